"""Convert transformers models into equivalent Heed models, and back."""
