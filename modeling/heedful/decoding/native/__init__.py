"""Greedy and beam search in plain PyTorch on the CPU, faster than `generate()`'s own loop."""
