"""Pairs for tasks that are no translation."""
