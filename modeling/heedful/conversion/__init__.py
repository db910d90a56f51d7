"""Models of transformers' own classes become Heed models that compute the same, and Heed models become theirs."""
