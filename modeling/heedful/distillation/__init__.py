"""Training data from another model: pairs and token probabilities."""
