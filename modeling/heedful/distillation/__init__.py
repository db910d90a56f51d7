"""Training data made by another model: pairs and token probabilities."""
