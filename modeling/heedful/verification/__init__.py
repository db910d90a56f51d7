"""Checks that a saved model behaves like any transformers model, and that its engines agree."""
