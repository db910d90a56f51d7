"""Commands that the laboratory adds to `heedful`: studies, task pairs, and what the course shows of a model."""
