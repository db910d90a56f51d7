"""A trained model measured: whether it behaves as any other, and whether its engines agree."""
