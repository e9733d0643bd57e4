"""`launch chat`: a conversation in the terminal."""

import contextlib
import re
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from penstock.launch.commands.ask import print_stream
from penstock.launch.commands.client_options import (
    add_client_options,
    connect_client,
    request_fields,
    system_messages,
)
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import ClientError

QUOTES = '"""'
HELP = f"""\
/clear  begin a new conversation
/exit   leave, as Ctrl-D does
/help   print this
{QUOTES}     begins and ends a message of several lines, or whose first word looks like a command
Ctrl-C  end an answer; without one, leave"""


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run)
    command.epilog = "Within the conversation, `/help` lists its commands."
    add_client_options(command)


def _run(arguments: Namespace) -> int:
    with connect_client(arguments) as client:
        if sys.stdin.isatty():
            name = arguments.model or client.status().by_model[0].name
            print(f"{name}; /help lists the commands, Ctrl-D leaves", file=sys.stderr)
        Chat(client, request_fields(arguments), system_messages(arguments)).run()
    return 0


class Chat:
    """A conversation whose questions are read from standard input."""

    def __init__(
        self, client: Client, fields: dict[str, Any], system: list[dict[str, str]]
    ) -> None:
        """fields: of each request; system: the messages that begin a conversation."""
        self._client, self._fields, self._system = client, fields, system
        self._messages = [*system]
        self._has_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Answer questions to the end of the input. Raises LaunchError for an open block."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` its editing keys
        while True:
            try:
                text = self._input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                if self._has_terminal:
                    print()
                return
            if text == "/exit":
                return
            if begin := re.match(r"/\w*(?!\S)", text):
                self._execute(begin[0], text)
            elif text := self._whole(text):
                self._ask(text)

    def _input(self, prompt: str) -> str:
        return input(prompt if self._has_terminal else "")

    def _whole(self, text: str) -> str:
        """Return a message whose first line is `text`; nothing for a block that was given up."""
        if not text.startswith(QUOTES):
            return text
        lines = [text.removeprefix(QUOTES)]
        try:
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(self._input("… "))
        except KeyboardInterrupt:
            print()
            return ""
        except EOFError:
            raise LaunchError(f"{QUOTES}: got the end of the input, expected {QUOTES}") from None
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")

    def _execute(self, command: str, text: str) -> None:
        match command:
            case "/clear" | "/exit" | "/help" if text != command:
                print(f"got {text!r}, expected {command} alone", file=sys.stderr)
            case "/help":
                print(HELP, file=sys.stderr)
            case "/clear":
                self._messages = [*self._system]
                print("a new conversation begins", file=sys.stderr)
            case _:
                print(f"unknown command {command}; /help lists them", file=sys.stderr)

    def _ask(self, text: str) -> None:
        question = {"role": "user", "content": text}
        stream = self._client.stream(messages=[*self._messages, question], **self._fields)
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
        self._messages += (question, {"role": "assistant", "content": answer})
