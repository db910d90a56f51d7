"""Text in, text out: a saved model is loaded, one of three engines searches, scores are computed."""
