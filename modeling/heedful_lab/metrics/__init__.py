"""Trained metrics for `heedful evaluate --metric`, found by entry points `heedful.metrics`."""
