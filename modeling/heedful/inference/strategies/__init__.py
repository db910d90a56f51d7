"""Decoding strategies for `generate(custom_generate=…)`, with any encoder-decoder of transformers."""
