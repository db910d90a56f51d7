"""The `heedful` command: what trains, and a file for each other kind of user: who uses, publishes or checks."""
