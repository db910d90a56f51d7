"""The laboratory: studies, what the course shows, the built-in corpus, task pairs, and COMET."""
