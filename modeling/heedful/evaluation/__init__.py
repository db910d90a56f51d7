"""Scores of translations against references, with signatures, intervals and tests: BLEU, chrF, TER, exact match, error rates."""
