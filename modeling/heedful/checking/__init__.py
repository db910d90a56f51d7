"""Checks on a recipe before training: pairs, tokens, number of updates, memory and time."""
