"""A training run: from a recipe, through data, updates and checkpoints, to a published folder."""
