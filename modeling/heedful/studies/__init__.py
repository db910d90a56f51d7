"""The paper's arguments as experiments: each computes or trains something small, and tells what it found."""
