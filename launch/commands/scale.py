"""`launch scale`: changes how many processes of a kind run."""

from argparse import ArgumentParser, Namespace

from penstock.launch.pipeline import control_client
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_name, name_of
from penstock.launch.pipeline.procfile import kind_of

# kind: the least number that a pipeline needs
SCALABLE = {"tokenizer": 1, "detokenizer": 1, "http": 0}


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    text = (
        "with several models MODEL/tokenizer and MODEL/detokenizer, as `launch status` names them"
    )
    command.add_argument("kind", metavar="|".join(SCALABLE), help=text)
    command.add_argument("number", type=int)
    add_name(command)


def _run(arguments: Namespace) -> int:
    kind, number = arguments.kind, arguments.number
    least = SCALABLE.get(kind_of(kind))
    if least is None:
        raise LaunchError(f"kind: got {kind!r}, expected one of {', '.join(SCALABLE)}")
    if number < least:
        raise LaunchError(f"number: got {number}, expected at least {least} {kind}")
    print(f"{kind}: {control_client.scale(name_of(arguments), kind, number)}")
    return 0
