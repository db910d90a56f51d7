"""A run's folder: checkpoints, progress, and the rules for resuming."""
