"""Text in, text out: a trained model loaded, its engines, its translations and their scores, how they are searched."""
