"""`launch keys`: makes the keys of a gateway and of its clients."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.config import DEFAULT_CLIENT


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    command.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="folder to create, with server.key, server.key_secret and, for each client, "
        "clients/NAME.key and NAME.key_secret; give server.key and NAME.key_secret to the client",
    )
    text = f"add a client to FOLDER (the first one is {DEFAULT_CLIENT!r})"
    command.add_argument("--client", metavar="NAME", help=text)


def _run(arguments: Namespace) -> int:
    print(*make_keys(arguments.folder, arguments.client), sep="\n")
    return 0
