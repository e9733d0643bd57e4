"""Logs of the processes, line by line, with the name of the process as prefix or in JSON maps."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.protocol.transport.process import json_line

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
NAME_WIDTH = len("detokenizer.1")
NUM_LAST_LINES = 10
MAX_LINE = 1 << 16
"""bytes: of a line in one piece, and of what a pipe of Linux holds"""
Format = Callable[[str], str]
"""returns what is printed for a line of one process"""


class Log:
    """Pipe that the runs of one process write to, read line by line.

    The supervisor holds both ends, so the pipe outlives the process: the last lines of a crashed
    process are still read, and its successor writes to the same pipe.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._begun = b""
        """a line without its end"""
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def finish(self) -> None:
        """Pass on what is in the pipe now, also a line without an end."""
        self._read()
        if self._begun:
            self._take(b"\n")

    def close(self) -> None:
        """Pass on what is left, and close the pipe."""
        self.finish()
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        os.close(self.writer)

    def _read(self) -> None:
        """Take all that is in the pipe, which holds up to MAX_LINE bytes."""
        with contextlib.suppress(BlockingIOError):
            self._take(os.read(self._reader, MAX_LINE))

    def _take(self, data: bytes) -> None:
        """Pass on lines that end with `data`, or are too long to wait for their end."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MAX_LINE:
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))


def at_node(name: str, node: str) -> str:
    """Return the name of a process, with its node if there are several."""
    return f"{name}@{node}" if node else name


def prefixed(name: str, index: int, node: str = "") -> Format:
    """`worker.2      | ` first, in colour on a terminal; `index` counts the kinds of processes."""
    width = NAME_WIDTH + len(at_node("", node))
    prefix = f"{at_node(name, node):<{width}} | "
    if sys.stdout.isatty():
        prefix = f"\033[{COLOURS[index % len(COLOURS)]}m{prefix}\033[0m"
    return lambda text: f"{prefix}{text}\n"


def as_json(name: str, node: str = "") -> Format:
    """Return a function that prints lines as JSON maps with the node.

    A line that is not a map, such as a traceback's, becomes the message of one.
    """

    def format_line(text: str) -> str:
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
        except DECODE_ERRORS:
            text = json_line(name, text)
            fields = msgspec.json.decode(text)
        if node:
            text = json.dumps(fields | {"node": node})
        return f"{text}\n"

    return format_line
