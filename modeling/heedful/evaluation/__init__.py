"""Scores for predictions, with signatures, intervals and tests: from BLEU to error rates."""
