"""Suitable settings, proposed from the data or found by a search."""
