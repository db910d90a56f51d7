"""Saved Marian, BART, mBART, M2M100 and NLLB models become Heed models that compute the same."""
