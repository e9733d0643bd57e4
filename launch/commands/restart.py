"""`launch restart`: restarts processes while requests continue."""

from argparse import ArgumentParser, Namespace

from penstock.launch.pipeline import control_client
from penstock.launch.pipeline.options import add_name, name_of


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    command.add_argument("target", metavar="PROCESS|KIND|all")
    add_name(command)


def _run(arguments: Namespace) -> int:
    for names in control_client.restart(name_of(arguments), arguments.target):
        print(f"{', '.join(names)}: back", flush=True)
    return 0
