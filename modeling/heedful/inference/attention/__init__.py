"""Seeing attention: maps of its weights, pictures, a page to hover over, rollout, entropy and alignments."""
