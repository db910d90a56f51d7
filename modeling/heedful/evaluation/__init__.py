"""Scores of predictions against references, with signatures, intervals and tests: from BLEU to error rates."""
