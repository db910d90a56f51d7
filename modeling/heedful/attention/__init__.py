"""Attention made visible: maps, pictures, an interactive page, rollout, entropy and alignments."""
