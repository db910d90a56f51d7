"""Pairs for tasks other than translation."""
