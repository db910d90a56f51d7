"""Heed models for browsers."""
