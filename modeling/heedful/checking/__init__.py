"""A recipe checked before training: its pairs, tokens, number of updates, memory and time."""
