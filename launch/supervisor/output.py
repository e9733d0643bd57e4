"""Output of the supervisor and its processes, which never waits for its readers.

Lines of processes arrive through pipes. Each line is prefixed with the name of its process, or has
the name in a JSON map.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.protocol.transport.process import json_line

# maximum bytes of lines that wait for a reader; newer lines are dropped
MAX_WAITING_BYTES = 1 << 24
LAST_SECONDS = 5.0  # seconds for a reader to take the last lines at the end
# errors of a full disk, which may have space later
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
NAME_WIDTH = len("detokenizer.1")
NUM_LAST_LINES = 10
MAX_LINE = 1 << 16  # bytes of a line in one piece; also the capacity of a Linux pipe


class Output:
    """Writer of lines to standard output and error, in order, from a separate thread.

    If the reader is slow (`launch all | less`, a terminal after Ctrl-S), lines wait. Beyond
    MAX_WAITING_BYTES, lines are dropped until all waiting lines are written. The number of dropped
    lines is then written. Lines for a full disk are dropped as well.
    """

    def __init__(self, on_closed: Callable[[], None], dropped: Callable[[int], str]) -> None:
        """Start the thread.

        on_closed: called in the thread when the reader has closed its end. dropped: returns the
        line that reports a number of dropped lines.
        """
        self._on_closed = on_closed
        self._dropped = dropped
        self._descriptors = [s.fileno() if s else None for s in (sys.stdout, sys.stderr)]
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, text: str, is_error: bool = False) -> None:
        """Accept lines, for standard error if `is_error`."""
        with self._changed:
            if self._num_dropped or self._num_bytes > MAX_WAITING_BYTES:
                self._num_dropped += text.count("\n")
                return
            data = text.encode(errors="replace")
            self._num_bytes += len(data)
            self._waiting.append((data, is_error))
            self._changed.notify()

    def close(self) -> None:
        """Wait until all lines are written, or LAST_SECONDS are over."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(LAST_SECONDS)

    def _run(self) -> None:
        num_lost = 0
        while taken := self._take():
            data, is_error = taken
            report = self._dropped(num_lost).encode() if num_lost else b""
            try:
                self._write_all(report + data, self._descriptors[is_error])
                num_lost = 0
            except OSError as error:
                if error.errno in FULL:
                    num_lost += data.count(b"\n")
                    continue
                if not self._is_closing:
                    self._on_closed()
                return
        if num_lost:
            with contextlib.suppress(OSError):
                self._write_all(self._dropped(num_lost).encode(), self._descriptors[True])

    def _take(self) -> tuple[bytes, bool] | None:
        """Wait for the next lines; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._num_dropped or self._is_closing)
            if self._waiting:
                self._num_bytes -= len(self._waiting[0][0])
                return self._waiting.popleft()
            number, self._num_dropped = self._num_dropped, 0
            return (self._dropped(number).encode(), False) if number else None

    @staticmethod
    def _write_all(data: bytes, descriptor: int | None) -> None:
        while data and descriptor is not None:
            data = data[os.write(descriptor, data) :]


class LogToOutput(logging.Handler):
    """Handler of log records of libraries, which would otherwise wait for the reader of stderr."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record line by line."""
        for line in self.format(record).splitlines():
            self._say(line)


class Log:
    """Pipe to which the runs of a process write, read line by line.

    The supervisor holds both ends, so the pipe outlives the process. The last lines of a crashed
    process are still read, and its successor writes to the same pipe.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._begun = b""  # an incomplete line
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def finish(self) -> None:
        """Pass on all current content of the pipe, including an incomplete line."""
        self._read()
        if self._begun:
            self._take(b"\n")

    def close(self) -> None:
        """Pass on the remaining content, and close the pipe."""
        self.finish()
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        os.close(self.writer)

    def _read(self) -> None:
        """Read the whole content of the pipe, which holds up to MAX_LINE bytes."""
        with contextlib.suppress(BlockingIOError):
            self._take(os.read(self._reader, MAX_LINE))

    def _take(self, data: bytes) -> None:
        """Pass on lines that end in `data`, or that are too long to wait for their end."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MAX_LINE:
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))


def at_node(name: str, node: str) -> str:
    """Return the name of a process, including its node if there are several nodes."""
    return f"{name}@{node}" if node else name


def prefixed(text: str, name: str, index: int, node: str = "") -> str:
    """Return a line with a prefix such as `worker.2 | `, coloured on a terminal.

    index: determines the colour, by kind of process.
    """
    width = NAME_WIDTH + len(at_node("", node))
    prefix = f"{at_node(name, node):<{width}} | "
    if sys.stdout.isatty():
        prefix = f"\033[{COLOURS[index % len(COLOURS)]}m{prefix}\033[0m"
    return f"{prefix}{text}\n"


def as_json(text: str, name: str, node: str = "") -> str:
    """Return a line as a JSON map that includes the node.

    A line that is not a map, such as a line of a traceback, becomes the message of a new map.
    """
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except DECODE_ERRORS:
        text = json_line(name, text)
        fields = msgspec.json.decode(text)
    if node:
        text = json.dumps(fields | {"node": node})
    return f"{text}\n"
