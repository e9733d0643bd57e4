"""`launch stop`: stops a pipeline."""

from argparse import ArgumentParser, Namespace

from penstock.launch.pipeline import run_folder
from penstock.launch.pipeline.options import add_name, name_of


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    add_name(command)


def _run(arguments: Namespace) -> int:
    run_folder.stop(name_of(arguments))
    return 0
