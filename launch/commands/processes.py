"""`launch scale`, `restart`, `stop`, `keys`, and an additional process of a running pipeline."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.launch.pipeline import control_client, run_folder
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.keys import make_keys
from penstock.launch.pipeline.options import add_name, name_of
from penstock.launch.pipeline.procfile import OF_MODEL, kind_of, read_procfile, shell_line
from penstock.launch.pipeline.run_folder import environment, running_config
from penstock.protocol.config import DEFAULT_CLIENT

# kind → minimum number that a pipeline needs
SCALABLE = {"tokenizer": 1, "detokenizer": 1, "http": 0}


def add_scale(command: ArgumentParser) -> None:
    command.set_defaults(run=_scale)
    text = (
        "with several models MODEL/tokenizer and MODEL/detokenizer, as `launch status` names them"
    )
    command.add_argument("kind", metavar="|".join(SCALABLE), help=text)
    command.add_argument("number", type=int)
    add_name(command)


def _scale(arguments: Namespace) -> int:
    kind, number = arguments.kind, arguments.number
    least = SCALABLE.get(kind_of(kind))
    if least is None:
        raise LaunchError(f"kind: got {kind!r}, expected one of {', '.join(SCALABLE)}")
    if number < least:
        raise LaunchError(f"number: got {number}, expected at least {least} {kind}")
    print(f"{kind}: {control_client.scale(name_of(arguments), kind, number)}")
    return 0


def add_restart(command: ArgumentParser) -> None:
    command.set_defaults(run=_restart)
    command.add_argument("target", metavar="PROCESS|KIND|all")
    add_name(command)


def _restart(arguments: Namespace) -> int:
    for names in control_client.restart(name_of(arguments), arguments.target):
        print(f"{', '.join(names)}: back", flush=True)
    return 0


def add_stop(command: ArgumentParser) -> None:
    command.set_defaults(run=_stop)
    add_name(command)


def _stop(arguments: Namespace) -> int:
    run_folder.stop(name_of(arguments))
    return 0


def add_service(command: ArgumentParser) -> None:
    command.set_defaults(run=_service, kind=command.prog.split()[-1])
    add_name(command)


def _service(arguments: Namespace) -> int:
    config = running_config(name_of(arguments))
    if len(config.by_model()) > 1 and arguments.kind in OF_MODEL:
        text = f"{arguments.kind}: got a pipeline of several models, expected one"
        raise LaunchError(f"{text}; `launch scale` adds tokenizers and detokenizers of a model")
    line = shell_line(read_procfile()[arguments.kind])
    os.execvpe("sh", ["sh", "-c", line], environment(config))  # noqa: S606


def add_keys(command: ArgumentParser) -> None:
    command.set_defaults(run=_keys)
    command.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="folder to create, with server.key, server.key_secret and, for each client, "
        "clients/NAME.key and NAME.key_secret; give server.key and NAME.key_secret to the client",
    )
    text = f"add a client to FOLDER (the first one is {DEFAULT_CLIENT!r})"
    command.add_argument("--client", metavar="NAME", help=text)


def _keys(arguments: Namespace) -> int:
    print(*make_keys(arguments.folder, arguments.client), sep="\n")
    return 0
