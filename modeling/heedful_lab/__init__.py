"""The laboratory: the studies, the generator of the built-in corpus, and task pairs; it plugs into `heedful`."""
