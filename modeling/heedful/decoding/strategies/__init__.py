"""Decoding strategies for `generate(custom_generate=…)` with any encoder-decoder, and CUDA graphs."""
