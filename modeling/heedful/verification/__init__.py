"""A trained model measured: whether it behaves as any other, whether its engines agree, and COMET."""
