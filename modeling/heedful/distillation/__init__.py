"""Data that a trained model makes to train another model: pairs, and probabilities of tokens."""
