"""`python -m heedful`: the command."""

from heedful.cli import main

main()
