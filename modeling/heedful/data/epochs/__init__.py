"""What a recipe asks of epochs: rows drawn anew, noise in texts, a teacher's tokens, pairs that are streamed."""
