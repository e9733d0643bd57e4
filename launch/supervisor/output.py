"""The supervisor's own output, for which it never waits."""

import contextlib
import errno
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 1 << 24
"""of lines that wait for a reader; newer ones are dropped"""
LAST_SECONDS = 5.0
"""for which a reader may take the last lines at the end"""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errors of a file without room, which may get some later"""


class Output:
    """Writes lines to standard output and error, in their order, from a thread of its own.

    Where nobody reads (`launch all | less`, a terminal after Ctrl-S), lines wait, and beyond
    MAX_WAITING_BYTES are dropped until all that wait are written. Then their number is. Lines for a
    full disk are dropped, too.
    """

    def __init__(self, on_closed: Callable[[], None], dropped: Callable[[int], str]) -> None:
        """Start the thread.

        on_closed: called in the thread when the reader has closed its end; dropped: returns the
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
        """Take lines, for standard error if `is_error`."""
        with self._changed:
            if self._num_dropped or self._num_bytes > MAX_WAITING_BYTES:
                self._num_dropped += text.count("\n")
                return
            data = text.encode(errors="replace")
            self._num_bytes += len(data)
            self._waiting.append((data, is_error))
            self._changed.notify()

    def close(self) -> None:
        """Return when all is written, or LAST_SECONDS are over."""
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
    """Passes on what libraries log, which would else wait for the reader of standard error."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Says a record, line by line."""
        for line in self.format(record).splitlines():
            self._say(line)
