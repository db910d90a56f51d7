"""Is it right? Checks of a recipe before it is trained, and of a model after."""
