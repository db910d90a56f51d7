"""Other forms of a saved model, compared with it before anything is kept: for transformers alone, and one page."""
