"""Text in, text out: load a trained model, translate with one of two engines, and score given translations."""
