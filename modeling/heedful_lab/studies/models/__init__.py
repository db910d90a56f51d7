"""Studies that compare models: positions, shared embeddings, memory, and length."""
