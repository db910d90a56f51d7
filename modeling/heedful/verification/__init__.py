"""A saved model checked: it behaves as any model of transformers, and its engines agree."""
