"""Sentence pairs in, batches out: read, clean, tokenize, encode, and group by length into updates."""
