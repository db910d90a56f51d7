"""Sentence pairs in, batches out: load, clean, tokenize, encode, and group by length into updates."""
