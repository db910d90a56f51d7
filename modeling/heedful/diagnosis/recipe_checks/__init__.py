"""What can be wrong in a recipe: with its pairs, with what tokenizers make of them, with the length of its run."""
