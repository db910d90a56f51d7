"""Text in, text out: loading a trained model, translating with one of two engines, and scoring given translations."""
