"""Greedy and beam search in plain PyTorch on the CPU, faster than the loop of `generate()`."""
