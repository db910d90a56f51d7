"""Text in, text out: loading a trained model, translating with one of three engines, and seeing its attention."""
