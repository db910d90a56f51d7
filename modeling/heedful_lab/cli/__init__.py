"""Commands that the laboratory adds to `heedful`: studies, task pairs, embeddings, and attention in numbers."""
