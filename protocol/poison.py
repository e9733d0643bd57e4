"""Poison requests: those that end the processes that work at them.

A request is known by a digest of what it asks for, so that it is recognized when it is sent again.
The supervisor does not count deaths that a poison request explains.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable
from time import monotonic

import msgspec
import zmq
from msgspec import Struct

from penstock.protocol.messages.supervisor import Pulse
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE, Process

MEMORY = 600.0
"""seconds for which a digest is remembered"""
MAX_KNOWN = 1024
"""digests that are remembered, the newest"""
MAX_SUSPECTS = 1 << 14
"""requests whose deaths are remembered, the newest"""
REFUSED = (
    "the same request, its prompt and parameters, has ended processes of the pipeline within the "
    f"last {MEMORY / 60:.0f} minutes; it is not tried again, change it"
)


class ProcessesDied(Struct, tag=True):
    """Scheduler or gateway → supervisor: processes died while they worked at requests."""

    processes: list[tuple[str, int]]
    """names and pids"""
    suspects: list[bytes]
    """digests of these requests"""


class PoisonFound(Struct, tag=True):
    """Scheduler or gateway → supervisor: a poison request is given up.

    It explains every death at which it was a suspect.
    """

    digest: bytes


class SuspectsCleared(Struct, tag=True):
    """Scheduler or gateway → supervisor: suspects were processed since, and explain no death."""

    digests: list[bytes]


ToSupervisor = Pulse | ProcessesDied | PoisonFound | SuspectsCleared


def digest_of(*parts: object) -> bytes:
    """Return 16 bytes that stand for these parts, which msgspec can encode."""
    frame = msgspec.msgpack.encode(parts, order="deterministic")
    return hashlib.blake2b(frame, digest_size=16).digest()


class PoisonList:
    """Digests of requests, and at how many deaths each was. Bounded; forgets after MEMORY."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """digest → deaths, and when they were put; the oldest first"""

    def __len__(self) -> int:
        return len(self._known)

    def num_deaths(self, digest: bytes) -> int:
        """Return 0 for a digest that is unknown."""
        num_deaths, since = self._known.get(digest, (0, 0.0))
        return num_deaths if monotonic() - since < MEMORY else 0

    def put(self, digest: bytes, num_deaths: int) -> None:
        """Remember a number of deaths instead of the one before; 0 forgets the digest."""
        self._known.pop(digest, None)
        if num_deaths:
            self._known[digest] = num_deaths, monotonic()
        while self._known and self._is_old():
            self._known.popitem(last=False)

    def digests(self) -> list[bytes]:
        """Return all digests that are not forgotten yet."""
        return [digest for digest in self._known if self.num_deaths(digest)]

    def _is_old(self) -> bool:
        _, since = next(iter(self._known.values()))
        return len(self._known) > MAX_KNOWN or monotonic() - since >= MEMORY


class DeathReports:
    """Reports to the supervisor, if there is one, which requests may have ended processes."""

    def __init__(self, process: Process) -> None:
        self.suspects: OrderedDict[bytes, None] = OrderedDict()
        """digests that were reported and not cleared, the newest"""
        self._channel: Channel[None] | None = None
        if SUPERVISOR_VARIABLE in os.environ:
            self._channel = process.context.connect(zmq.PUSH, process.endpoints.pulses)

    def died(self, processes: list[tuple[str, int]], suspects: list[bytes]) -> None:
        """As `ProcessesDied`."""
        if self._channel and processes and suspects:
            self._channel.send(ProcessesDied(processes, suspects))
            self.suspects |= dict.fromkeys(suspects)
            while len(self.suspects) > MAX_SUSPECTS:
                self.suspects.popitem(last=False)

    def clear(self, digests: Iterable[bytes]) -> None:
        """As `SuspectsCleared`; only suspects are reported."""
        cleared = [one for one in digests if self.suspects.pop(one, one) is None]
        if self._channel and cleared:
            self._channel.send(SuspectsCleared(cleared))

    def found(self, digest: bytes) -> None:
        """As `PoisonFound`."""
        if self._channel:
            self._channel.send(PoisonFound(digest))
