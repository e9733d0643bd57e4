"""Places of HTTP requests: how many may be open, and how many bytes they may have, by address.

Nobody waits for a place. A request gets that of the slowest request which is still arriving, of the
address with most of them, or it is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from penstock.protocol.shares import exceeds

PART_BYTES = 64
"""of memory for a decoded list, map or string, in addition to its text"""


def decoded_bytes(body: bytes) -> int:
    """Return the bytes, at most, that a body in JSON takes until it is answered.

    They are its texts, what is sent to the gateway, and its parts.
    """
    num_parts = body.count(b"[") + body.count(b"{") + body.count(b'"') // 2
    return 2 * len(body) + PART_BYTES * num_parts


class Occupant(Protocol):
    """A connection, as far as its place depends on it."""

    host: str
    began: float
    """moment at which its request began to arrive"""

    @property
    def due(self) -> float:
        """Moment at which its request must have arrived."""

    def give_way(self) -> None:
        """Refuse the request that is arriving, and close the connection."""


class Share:
    """Open requests of one address, or of all."""

    def __init__(self) -> None:
        self.num_open = self.num_bytes = 0


class Places:
    """Connections of one server, by what they do."""

    def __init__(self, max_connections: int, max_requests: int, max_bytes: int) -> None:
        """max_bytes: of open requests, from the first byte of each to the end of its response."""
        self.idle: dict[Any, None] = {}
        """connections without a request whose headers have arrived, oldest first"""
        self._max_connections, self._max_requests = max_connections, max_requests
        self._max_bytes = max_bytes
        self._arriving: dict[Occupant, None] = {}
        """connections with a request whose body has not arrived"""
        self._open: dict[Occupant, int] = {}
        """connections with a request → its bytes"""
        self._total = Share()
        self._shares: dict[str, Share] = {}
        """of addresses that have open requests"""

    def connect(self, new: Occupant) -> Occupant | None:
        """Add a connection. Return an idle one that is to be closed in its place."""
        self.idle[new] = None
        if len(self.idle) + len(self._open) <= self._max_connections:
            return None
        return _worst(self.idle, size=lambda _: 1, key=lambda _: 0.0)

    def begin(self, occupant: Occupant, must_have: bool) -> bool:
        """Give a place to a request whose headers have arrived, and make others give way.

        Return False if all others are being answered, unless the request must have a place.
        """
        self.idle.pop(occupant, None)
        if occupant in self._open:
            return True  # an earlier request of the connection is being answered
        share = self._shares.get(occupant.host, Share())
        while exceeds(1, share.num_open, self._total.num_open, self._max_requests):
            if not self._take_place(lambda _: 1, lambda one: one.due):
                if must_have:
                    break
                return False
        self._open[occupant] = 0
        self._count(occupant, 1, 0)
        self.arrives(occupant)
        return True

    def arrives(self, occupant: Occupant) -> None:
        """Let a request that has a place give way to others until it has `arrived`."""
        self._arriving[occupant] = None

    def grow(self, occupant: Occupant, num_bytes: int) -> bool:
        """Count bytes of a request; False if there is no place for them."""
        if occupant not in self._open:
            return True  # it is answered already, so nothing is kept
        share = self._shares[occupant.host]
        while exceeds(num_bytes, share.num_bytes, self._total.num_bytes, self._max_bytes):
            if not self._take_place(self._open.__getitem__, lambda one: one.began, occupant):
                return False
        self._open[occupant] += num_bytes
        self._count(occupant, 0, num_bytes)
        return True

    def arrived(self, occupant: Occupant) -> None:
        self._arriving.pop(occupant, None)

    def end(self, occupant: Occupant) -> None:
        """Free what the requests of a connection have."""
        self._arriving.pop(occupant, None)
        if (num_bytes := self._open.pop(occupant, None)) is not None:
            self._count(occupant, -1, -num_bytes)

    def leave(self, occupant: Occupant) -> None:
        """Forget a connection."""
        self.end(occupant)
        self.idle.pop(occupant, None)

    def _count(self, occupant: Occupant, num_open: int, num_bytes: int) -> None:
        share = self._shares.setdefault(occupant.host, Share())
        for counted in (share, self._total):
            counted.num_open += num_open
            counted.num_bytes += num_bytes
        if not share.num_open:
            del self._shares[occupant.host]

    def _take_place(
        self,
        size: Callable[[Occupant], int],
        key: Callable[[Occupant], float],
        taker: Occupant | None = None,
    ) -> bool:
        """Make an arriving request give way; False if there is none but the taker's."""
        found = _worst([one for one in self._arriving if one is not taker], size, key)
        if found:
            self.leave(found)
            found.give_way()
        return found is not None


def _worst(
    among: Iterable[Occupant], size: Callable[[Occupant], int], key: Callable[[Occupant], float]
) -> Occupant | None:
    """Return the connection with the lowest key, of the address with the largest size."""
    sizes: Counter[str] = Counter()
    for occupant in among:
        sizes[occupant.host] += size(occupant)
    if not sizes:
        return None
    largest = max(sizes, key=sizes.__getitem__)
    return min((occupant for occupant in among if occupant.host == largest), key=key)
