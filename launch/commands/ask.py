"""`launch ask`: prints the answer to one question as it comes."""

from argparse import ArgumentParser, Namespace
from typing import Any

import msgspec

from penstock.launch.commands.client_options import (
    add_client_options,
    connect_client,
    request_fields,
)
from penstock.protocol.client.client import Stream

INTERRUPTED = 130
"""exit code after Ctrl-C, as in shells"""


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    command.add_argument("question")
    command.add_argument(
        "--raw", action="store_true", help="continue the text without the chat template"
    )
    command.add_argument("--json", action="store_true", help="print the whole reply as JSON")
    add_client_options(command)


def print_stream(stream: Stream) -> None:
    """Print the text of a stream as it comes, with a line end."""
    end = "\n"
    for delta in stream:
        print(delta.text, end="", flush=True)
        end = delta.text[-1:] or end
    if end != "\n":
        print()


def _run(arguments: Namespace) -> int:
    question: dict[str, Any] = {"prompt": arguments.question}
    if not arguments.raw:
        question = {"messages": [{"role": "user", "content": arguments.question}]}
    question |= request_fields(arguments)
    with connect_client(arguments) as client:
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
