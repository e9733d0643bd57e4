"""`launch ask` and `launch chat`: the commands that send requests to a pipeline."""

import contextlib
import math
import os
import re
import select
import socket
import stat
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

import msgspec

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_name, add_options, given_options, name_of
from penstock.launch.pipeline.procfile import check_descriptors
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.client.client import Client, Stream
from penstock.protocol.client.connection import check_addresses
from penstock.protocol.client.session import ClientError, NoAnswer
from penstock.protocol.config import DEFAULT_CLIENT
from penstock.protocol.messages.sampling import SamplingParams

OPEN_FILES = 32  # maximum descriptors of a command with a client

# seconds without a connection or input, after which a command reports that it waits
SILENCE = 2.0
MAX_BYTES = 1 << 26  # larger than any context
STDIN = 0
INTERRUPTED = 130  # exit code after Ctrl-C, as in shells
QUOTES = '"""'
HELP = f"""\
/clear  begin a new conversation
/exit   leave, as Ctrl-D does
/help   print this
{QUOTES}     begins and ends a message of several lines, or whose first word looks like a command
Ctrl-C  end an answer; without one, leave"""


class WaitingClient(Client):
    """Client that waits without limit, and reports on stderr if nothing answers."""

    def __init__(
        self, endpoint: str, keys: str | None, client: str, seconds: float = math.inf
    ) -> None:
        """Connect. Raises ClientError for unreadable keys and for an invalid address.

        seconds: time from the first `wait` until NoAnswer is raised.
        """
        super().__init__(endpoint, timeout=min(SILENCE, seconds), keys=keys, client=client)
        self._endpoint = endpoint
        self._seconds = seconds
        self._deadline = math.inf
        self._has_reported = False

    def wait(self) -> None:
        """Wait for a sign of the pipeline; report once if it is not connected."""
        self._deadline = min(self._deadline, time.monotonic() + self._seconds)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise NoAnswer(f"no whole answer within {self._seconds:g} s")
        self._timeout = min(SILENCE, left)
        try:
            super().wait()
        except NoAnswer:
            if not (self._connection.is_connected or self._has_reported):
                text = f"launch: waiting for {self._endpoint}: nothing answers there yet"
                print(text, file=sys.stderr, flush=True)
                self._has_reported = True

    def abort(self, request_id: str) -> bool:
        """Abort a request. Return False if it is not running, or nothing answers."""
        return self._connection.is_connected and super().abort(request_id)


def add_client_options(command: ArgumentParser) -> None:
    """Add the options of commands with a client."""
    add_name(command)
    text = "address of the gateway, in place of --name; A,B,…: several addresses for failover"
    command.add_argument("--endpoint", help=text)
    text = "folder with server.key and NAME.key_secret"
    command.add_argument("--curve-keys", metavar="FOLDER", help=text)
    command.add_argument(
        "--client",
        metavar="NAME",
        default=DEFAULT_CLIENT,
        help="name of the client key (default: %(default)s)",
    )
    command.add_argument("--model", help="name of the model (default: the first one)")
    command.add_argument("--system", metavar="TEXT", help="system prompt")
    fields = [field for field in SamplingParams.__struct_fields__ if field != "n"]
    add_options(command, SamplingParams, fields)


def request_fields(arguments: Namespace) -> dict[str, Any]:
    """Return the request fields given on the command line."""
    return given_options(arguments, SamplingParams) | {"model": arguments.model}


def system_messages(arguments: Namespace) -> list[dict[str, str]]:
    """Return the system messages that begin a conversation."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def connect_client(arguments: Namespace) -> Client:
    """Return a connected client. Raises LaunchError for an invalid address or keys."""
    check_descriptors(OPEN_FILES, "; raise it (`ulimit -n`)")
    endpoint, keys = arguments.endpoint, arguments.curve_keys
    if endpoint is None:
        config = running_config(name_of(arguments))
        endpoint, keys = config.endpoint, keys or config.curve_keys
    try:
        check_addresses(endpoint)
        if arguments.endpoint:
            _check_hosts(endpoint)
        seconds = getattr(arguments, "timeout", math.inf)
        return WaitingClient(endpoint, keys, arguments.client, seconds)
    except ClientError as error:
        raise LaunchError(str(error)) from error


def _check_hosts(endpoint: str) -> None:
    """Raise LaunchError if no host of the addresses resolves; libzmq would retry forever.

    libzmq resolves IPv6 addresses only if the address has brackets.
    """
    reasons = []
    for address in endpoint.split(","):
        host = address.removeprefix("tcp://").rpartition(":")[0].rpartition(";")[2]
        if address.startswith("ipc://") or host == "*":
            return
        family = socket.AF_UNSPEC if "[" in address else socket.AF_INET
        try:
            socket.getaddrinfo(host.strip("[]").encode(), None, family)
        except OSError as error:
            reasons.append(f"{host}: {error.strerror}")
        else:
            return
    raise LaunchError(
        f"--endpoint: got {endpoint!r}, expected a host that can be resolved ({'; '.join(reasons)})"
    )


def read_input() -> str:
    """Return the text of standard input without trailing line ends.

    A terminal or another device has no text. Raises LaunchError for bytes that are not text.
    """
    mode = os.fstat(STDIN).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISDIR(mode):
        return ""
    if not select.select([STDIN], [], [], SILENCE)[0]:
        text = "launch: reading the standard input to its end; `< /dev/null` gives none"
        print(text, file=sys.stderr, flush=True)
    with open(STDIN, "rb", closefd=False) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise LaunchError(f"standard input: got more than {MAX_BYTES >> 20} MiB, expected less")
    try:
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"standard input: got byte {error.object[error.start]:#04x} at {error.start}, "
            "expected text in UTF-8"
        ) from None


def add_ask(command: ArgumentParser) -> None:
    command.set_defaults(run=_ask)
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
    """Print the text of a stream as it arrives, followed by a line end."""
    end = "\n"
    try:
        for delta in stream:
            print(delta.text, end="", flush=True)
            end = delta.text[-1:] or end
    finally:
        if end != "\n":
            print()


def _question(arguments: Namespace) -> dict[str, Any]:
    """Return the fields of the question. Raises LaunchError for a missing question."""
    parts = [part for part in (arguments.question, read_input()) if part]
    if not parts:
        raise LaunchError("question: got nothing, expected an argument or text on standard input")
    text = "\n\n".join(parts)
    if not arguments.raw:
        return {"messages": [*system_messages(arguments), {"role": "user", "content": text}]}
    if arguments.system:
        raise LaunchError("--system: got it with --raw, expected one of them")
    return {"prompt": text}


def _ask(arguments: Namespace) -> int:
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


def add_chat(command: ArgumentParser) -> None:
    command.set_defaults(run=_chat)
    command.epilog = "Within the conversation, `/help` lists its commands."
    add_client_options(command)


def _chat(arguments: Namespace) -> int:
    with connect_client(arguments) as client:
        if sys.stdin.isatty():
            name = arguments.model or client.status().by_model[0].name
            print(f"{name}; /help lists the commands, Ctrl-D leaves", file=sys.stderr)
        Chat(client, request_fields(arguments), system_messages(arguments)).run()
    return 0


class Chat:
    """Conversation whose questions are read from standard input."""

    def __init__(
        self, client: Client, fields: dict[str, Any], system: list[dict[str, str]]
    ) -> None:
        """Begin a conversation; fields: those of each request; system: its first messages."""
        self._client, self._fields, self._system = client, fields, system
        self._messages = [*system]
        self._has_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Answer questions until the input ends. Raises LaunchError for an open block."""
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
        """Return the message that starts with the line `text`; empty for a cancelled block."""
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
