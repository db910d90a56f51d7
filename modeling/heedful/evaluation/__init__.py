"""Scores of translations against references: BLEU, chrF, TER and exact match, with signatures and intervals."""
