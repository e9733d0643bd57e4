"""`launch help`: the same as `--help`."""

from argparse import ArgumentParser, Namespace

from penstock.launch.commands.cli import make_parser


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    text = "a command, such as `status` or `bench serve` (default: all)"
    command.add_argument("words", metavar="COMMAND", nargs="*", help=text)


def _run(arguments: Namespace) -> int:
    make_parser().parse_args([*arguments.words, "--help"])  # exits
    return 0
