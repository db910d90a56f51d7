"""`python -m heedful`: the command."""

from heedful.cli.main import main

main()
