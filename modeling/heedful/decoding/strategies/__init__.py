"""Decoding strategies for `generate(custom_generate=…)`, with any encoder-decoder; steps in CUDA graphs."""
