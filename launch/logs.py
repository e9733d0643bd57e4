"""The log of each process, line by line: behind the name of the process, or as JSON maps."""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.logs import json_line
from penstock.protocol.sockets import UNREADABLE

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
NAME_WIDTH = len("detokenizer.1")
NUM_LAST_LINES = 10
MAX_LINE = 1 << 16
Show = Callable[[str], str]
"""what is printed for a line of one process"""


class Log:
    """Reads what one process writes, and prints it.

    The process writes to a named pipe, which outlives it: what a crashed process said last is
    still there, and the next of that name goes on in the same pipe.
    """

    def __init__(self, path: Path, show: Show, write: Callable[[str], None]) -> None:
        self.path = path
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._show = show
        self._write = write
        self._begun = b""
        os.mkfifo(path, 0o600)
        # for writing too, so that the pipe has no end when a process dies
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def drain(self) -> None:
        """Takes what is in the pipe now."""
        while self._read():
            pass

    def close(self) -> None:
        """Prints what is left."""
        self.drain()
        if self._begun:
            self._take(b"\n")
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)
        self.path.unlink()

    def _read(self) -> bool:
        try:
            self._take(os.read(self._pipe, MAX_LINE))
        except BlockingIOError:
            return False
        return True

    def _take(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MAX_LINE:
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            self.last_lines.append(text)
            self._write(self._show(text))


def behind_name(name: str, index: int) -> Show:
    """`worker.2      | ` first, in colour on a terminal; `index` counts the kinds of processes."""
    prefix = f"{name:<{NAME_WIDTH}} | "
    if sys.stdout.isatty():
        prefix = f"\033[{COLOURS[index % len(COLOURS)]}m{prefix}\033[0m"
    return lambda text: f"{prefix}{text}\n"


def as_json(name: str) -> Show:
    """A line that is a JSON map as it is; others, a traceback's, as the message of one."""

    def show(text: str) -> str:
        try:
            msgspec.json.decode(text, type=dict[str, Any])
        except UNREADABLE:
            text = json_line(name, text)
        return f"{text}\n"

    return show
