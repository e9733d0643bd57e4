"""Poison requests, which end the processes that work at them.

`Suspects` finds them: any work that a process had when it died may be the cause. A request is known
by a digest of its content, so that it is recognized when it is sent again.
The supervisor does not count deaths that a poison request explains.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from time import monotonic
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec

MEMORY = 600.0  # seconds for which a digest is remembered
MAX_KNOWN = 1024  # digests that are remembered, the newest
MAX_DEATHS = 2  # deaths at trials of a suspect; it was alone in the last trial
Work = TypeVar("Work")
REFUSED = (
    "the same request, its prompt and parameters, has ended processes of the pipeline within the "
    f"last {MEMORY / 60:.0f} minutes; it is not tried again, change it"
)


def digest_of(*parts: object) -> bytes:
    """Return the digest of these parts, 16 bytes; see `comparable`."""
    return hashlib.blake2b(msgspec.msgpack.encode(comparable(parts)), digest_size=16).digest()


def comparable(value: object) -> object:
    """Return `value` with sorted strings as keys. Raises TypeError for None and bytes as keys."""
    return msgspec.to_builtins(value, str_keys=True, order="deterministic", builtin_types=(bytes,))


class Suspects(WeakKeyDictionary[Work, int]):
    """Work that processes had when they died → the deaths at its trials.

    A suspect is tried without work that is not suspect. A death at a trial counts for each piece of
    work that was tried. Work that is alone at MAX_DEATHS deaths is poison; work that is done is
    removed.
    """

    def add(self, lost: Iterable[Work]) -> None:
        """Suspect the work of a process that died."""
        for work in lost:
            self.setdefault(work, 0)

    def blame(self, trial: Collection[Work]) -> list[Work]:
        """Count a death at a trial. Return the poison."""
        for work in trial:
            if work in self:  # otherwise the work was closed meanwhile
                self[work] += 1
        is_alone = len(trial) == 1
        return [work for work in trial if is_alone and self.get(work, 0) >= MAX_DEATHS]


class PoisonList(OrderedDict[bytes, tuple[int, float]]):
    """Map from the digest of each request to its deaths and the time of its entry, oldest first.

    The map has at most MAX_KNOWN entries, which expire after MEMORY seconds.
    """

    def num_deaths(self, digest: bytes) -> int:
        num_deaths, since = self.get(digest, (0, 0.0))
        return num_deaths if monotonic() - since < MEMORY else 0

    def put(self, digest: bytes, num_deaths: int) -> None:
        """Remember a number of deaths in place of the previous number; 0 forgets the digest."""
        self.pop(digest, None)
        if num_deaths:
            self[digest] = num_deaths, monotonic()
        while self and self._is_old():
            self.popitem(last=False)

    def digests(self) -> list[bytes]:
        """Return all digests that are not forgotten yet."""
        return [digest for digest in self if self.num_deaths(digest)]

    def _is_old(self) -> bool:
        _, since = next(iter(self.values()))
        return len(self) > MAX_KNOWN or monotonic() - since >= MEMORY
