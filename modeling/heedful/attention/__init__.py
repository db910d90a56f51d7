"""Seeing attention: maps of weights and scores, pictures, a page to hover over, rollout, entropy and alignments."""
