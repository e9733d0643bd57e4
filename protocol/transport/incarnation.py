"""Incarnation numbers: of two processes the one that was started later has the larger number.

Attempts, epochs and identities are made of them. No clock is asked: one that was set back would
make a restarted process older than its predecessor, and nobody would listen to it.
"""

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

INCARNATION_VARIABLE = "PENSTOCK_INCARNATION"
"""the supervisor's number for a process that it starts"""
COUNTER_FILE = "incarnations"
"""in the run folder: the last number that a process without a supervisor has taken"""
_BITS = 32
"""numbers of one process: 4 billion, so that 2 billion incarnations fit into an int64"""


def take_incarnation(folder: Path) -> int:
    """Return this process's number: its supervisor's, or the next one of the run folder."""
    given = os.environ.get(INCARNATION_VARIABLE)
    return int(given) if given else _next(folder / COUNTER_FILE)


def first_number(incarnation: int) -> int:
    """Return the first of an incarnation's own numbers, which are above all of earlier ones."""
    return incarnation << _BITS


class Identity(NamedTuple):
    """One incarnation of a process, as its sockets are known to peers."""

    name: str
    pid: int = 0
    incarnation: int = 0

    def encode(self) -> bytes:
        """Return it as a ZeroMQ routing id."""
        return f"{self.name}/{self.pid}/{self.incarnation}".encode()

    @classmethod
    def decode(cls, routing_id: bytes) -> "Identity":
        """Return what a routing id says; its whole text as the name if that is nothing."""
        name, *numbers = routing_id.decode(errors="replace").rsplit("/", 2)
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            return cls(name, *map(int, numbers))
        return cls(routing_id.decode(errors="replace"))


def _next(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = int(os.pread(file, 20, 0) or 0) + 1
        os.pwrite(file, b"%020d" % number, 0)  # of one length: never half an old number
        return number
    finally:
        os.close(file)
