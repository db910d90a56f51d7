"""Trained metrics, which entry points `heedful.metrics` give to `heedful evaluate --metric`."""
