"""The log of each process, line by line: behind the name of the process, or as JSON maps."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.logs import json_line
from penstock.protocol.transport.channel import DECODE_ERRORS

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
NAME_WIDTH = len("detokenizer.1")
NUM_LAST_LINES = 10
MAX_LINE = 1 << 16
Show = Callable[[str], str]
"""what is printed for a line of one process"""


class Lines:
    """Cuts what a process writes into lines."""

    def __init__(self) -> None:
        self._begun = b""

    def take(self, data: bytes) -> list[str]:
        """The lines that end with `data`, or are too long to wait for their end."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MAX_LINE:
            lines, self._begun = [*lines, self._begun], b""
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def take_rest(self) -> list[str]:
        """The line that has no end."""
        return self.take(b"\n") if self._begun else []


class Log:
    """Reads what one process writes, and passes it on line by line.

    The process writes to a named pipe, which outlives it: what a crashed process said last is
    still there, and the next of that name goes on in the same pipe.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self.path = path
        self._on_line = on_line
        self._lines = Lines()
        self._open()

    def restore(self) -> None:
        """Makes the pipe again if its name was removed, before a process is to open it."""
        if not self.path.is_fifo():
            self._close()
            self._open()

    def drain(self) -> None:
        """Takes what is in the pipe now."""
        while self._read():
            pass

    def close(self) -> None:
        """Passes on what is left."""
        self.drain()
        self._pass_on(self._lines.take_rest())
        self._close()

    def _open(self) -> None:
        os.mkfifo(self.path, 0o600)
        # for writing too, so that the pipe has no end when a process dies
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)
        self.path.unlink(missing_ok=True)

    def _read(self) -> bool:
        try:
            self._pass_on(self._lines.take(os.read(self._pipe, MAX_LINE)))
        except BlockingIOError:
            return False
        return True

    def _pass_on(self, lines: list[str]) -> None:
        for line in lines:
            self._on_line(line)


def at_node(name: str, node: str) -> str:
    """A process and its node, if there are several."""
    return f"{name}@{node}" if node else name


def behind_name(name: str, index: int, node: str = "") -> Show:
    """`worker.2      | ` first, in colour on a terminal; `index` counts the kinds of processes."""
    width = NAME_WIDTH + len(at_node("", node))
    prefix = f"{at_node(name, node):<{width}} | "
    if sys.stdout.isatty():
        prefix = f"\033[{COLOURS[index % len(COLOURS)]}m{prefix}\033[0m"
    return lambda text: f"{prefix}{text}\n"


def as_json(name: str, node: str = "") -> Show:
    """A line that is a JSON map as it is, with the node in it; others, a traceback's, as the
    message of one."""

    def show(text: str) -> str:
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
        except DECODE_ERRORS:
            text = json_line(name, text)
            fields = msgspec.json.decode(text)
        if node:
            text = json.dumps(fields | {"node": node})
        return f"{text}\n"

    return show
