"""`launch ask`: prints the answer to one question as it comes."""

import contextlib
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

import msgspec

from penstock.launch.commands.client_input import read_input
from penstock.launch.commands.client_options import (
    add_client_options,
    connect_client,
    request_fields,
    system_messages,
)
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.client import Stream

INTERRUPTED = 130  # exit code after Ctrl-C, as in shells


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    text = "standard input follows it, or takes its place: `git diff | launch ask 'Review this.'`"
    command.add_argument("question", nargs="?", help=text)
    text = "time for the whole answer (default: no limit)"
    command.add_argument("--timeout", type=_seconds, default=math.inf, metavar="SECONDS", help=text)
    command.add_argument(
        "--raw", action="store_true", help="continue the text without the chat template"
    )
    command.add_argument("--json", action="store_true", help="print the whole reply as JSON")
    add_client_options(command)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ArgumentTypeError(f"got {text!r}, expected a number of seconds above 0")


def print_stream(stream: Stream) -> None:
    """Print the text of a stream as it comes, with a line end."""
    end = "\n"
    try:
        for delta in stream:
            print(delta.text, end="", flush=True)
            end = delta.text[-1:] or end
    finally:
        if end != "\n":
            print()


def _question(arguments: Namespace) -> dict[str, Any]:
    """Return the fields of the question. Raises LaunchError if there is none."""
    parts = [part for part in (arguments.question, read_input()) if part]
    if not parts:
        raise LaunchError("question: got nothing, expected an argument or text on standard input")
    text = "\n\n".join(parts)
    if not arguments.raw:
        return {"messages": [*system_messages(arguments), {"role": "user", "content": text}]}
    if arguments.system:
        raise LaunchError("--system: got it with --raw, expected one of them")
    return {"prompt": text}


def _run(arguments: Namespace) -> int:
    with connect_client(arguments) as client:
        question = _question(arguments) | request_fields(arguments)
        stream = client.submit(stream=not arguments.json, **question)
        try:
            if arguments.json:
                print(msgspec.json.encode(stream.result()).decode())
            else:
                print_stream(stream)
        except KeyboardInterrupt:
            stream.abort()
            return INTERRUPTED
    return 0
