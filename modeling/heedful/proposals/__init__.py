"""Settings that fit: proposed from the data, or found by a search."""
