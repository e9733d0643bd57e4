"""`launch chat`: a conversation in the terminal."""

import contextlib
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from penstock.launch.commands.ask import print_stream
from penstock.launch.commands.client_options import (
    add_client_options,
    connect_client,
    request_fields,
)
from penstock.protocol.client.client import Client
from penstock.protocol.client.errors import ClientError


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    add_client_options(command)


def _run(arguments: Namespace) -> int:
    with connect_client(arguments) as client:
        return _chat(client, request_fields(arguments))


def _chat(client: Client, fields: dict[str, Any]) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` its editing keys
    messages: list[dict[str, str]] = []
    has_terminal = sys.stdin.isatty()
    while True:
        try:
            text = input("> " if has_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if has_terminal:
                print()
            return 0
        if text:
            _turn(client, fields, messages, text)


def _turn(
    client: Client, fields: dict[str, Any], messages: list[dict[str, str]], text: str
) -> None:
    question = {"role": "user", "content": text}
    stream = client.stream(messages=[*messages, question], **fields)
    try:
        try:
            print_stream(stream)
        except KeyboardInterrupt:
            stream.abort()
            print()
        answer = stream.result().text
    except ClientError as error:
        print(f"launch: {error}", file=sys.stderr)
        return
    messages += (question, {"role": "assistant", "content": answer})
