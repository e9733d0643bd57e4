"""`launch options`: the options of a pipeline as a markdown table."""

from argparse import ArgumentParser, Namespace

from penstock.launch.pipeline.options import options_table


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)


def _run(_: Namespace) -> int:
    print(options_table())
    return 0
