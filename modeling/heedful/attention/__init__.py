"""Attention made visible: maps of weights and scores, pictures, an interactive page, rollout, entropy, alignments."""
