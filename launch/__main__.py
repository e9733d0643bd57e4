"""`python -P -m penstock.launch`: the command line, where `launch` is not on the PATH."""

from penstock.launch.commands.cli import main

main()
