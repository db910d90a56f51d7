"""What a model makes for another one to learn from: pairs, and probabilities of tokens."""
