"""`launch ask` and `launch chat`: answers as they come."""

import contextlib
import sys
from typing import Any

import msgspec

from penstock.protocol.client.client import Client, Stream
from penstock.protocol.client.errors import ClientError

INTERRUPTED = 130
"""the exit code of a command that Ctrl-C ended, as shells have it"""


def ask(client: Client, question: dict[str, Any], as_json: bool) -> int:
    """Prints one answer: its text, or the whole reply as JSON."""
    stream = client.submit(stream=not as_json, **question)
    try:
        if as_json:
            print(msgspec.json.encode(stream.result()).decode())
        else:
            _print(stream)
    except KeyboardInterrupt:
        stream.abort()
        return INTERRUPTED
    return 0


def chat(client: Client, sampling: dict[str, Any]) -> int:
    """A conversation: Ctrl-C ends an answer, Ctrl-D the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` its editing keys
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text:
            _turn(client, sampling, messages, text)


def _turn(
    client: Client, sampling: dict[str, Any], messages: list[dict[str, str]], text: str
) -> None:
    question = {"role": "user", "content": text}
    stream = client.stream(messages=[*messages, question], **sampling)
    try:
        try:
            _print(stream)
        except KeyboardInterrupt:
            stream.abort()
            print()
        answer = stream.result().text
    except ClientError as error:
        print(f"launch: {error}", file=sys.stderr)
        return
    messages += (question, {"role": "assistant", "content": answer})


def _print(stream: Stream) -> None:
    end = "\n"
    for delta in stream:
        print(delta.text, end="", flush=True)
        end = delta.text[-1:] or end
    if end != "\n":
        print()
