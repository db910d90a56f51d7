"""What a model is published with: its card, its learning curve, and what `heedful push` sends."""
