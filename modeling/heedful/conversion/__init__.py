"""Convert transformers models into equal Heed models, and back."""
