"""The `heedful` command, a file per kind of user: who trains, who uses a model, who publishes one, who checks."""
