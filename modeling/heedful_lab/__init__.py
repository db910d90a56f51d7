"""The laboratory: studies, what the course shows, the generator of the built-in corpus, and task pairs."""
