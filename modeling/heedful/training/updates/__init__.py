"""One update: objective, optimizer, learning rate, the gradient at any split, and the compiled or packed step."""
