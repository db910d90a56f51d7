"""Studies that compare models: with other positions, shared or own embeddings, other memories, other lengths."""
