"""One update: its objective, optimizer, learning rate, gradient at any split, and the compiled or packed step."""
