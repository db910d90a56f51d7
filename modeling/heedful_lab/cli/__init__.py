"""Commands that the laboratory adds to `heedful`: `study` and `pairs`."""
