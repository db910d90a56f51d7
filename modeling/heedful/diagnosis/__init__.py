"""Is it right? Checks on a recipe before it is trained, and on a model after."""
