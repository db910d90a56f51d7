"""The laboratory: studies, views for the course, the built-in corpus, task pairs, and COMET."""
