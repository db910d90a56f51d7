"""The folder of a run: its checkpoints, its progress, and the rules for resuming it."""
