"""The `heedful` command, with a file for each subcommand."""
