"""Places of HTTP requests: how many may be open, and how many bytes they may have, by address.

Nobody waits for a place. A request gets that of the slowest request which is still arriving, of the
address with most of them, or it is refused.
"""

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from penstock.protocol.fair_queue import exceeds

PART_BYTES = 64  # of memory for a decoded list, map or string, in addition to its text
NUMBER_BYTES = 40  # of memory for a decoded number in a list, and for its places in two lists
MAX_EXAMINED = 32  # requests of which the slowest gives way


def decoded_bytes(body: bytes) -> int:
    """Return the bytes, at most, that a body in JSON takes until it is answered.

    They are its texts, what is sent to the gateway, and its parts. Each comma may follow a number.
    """
    num_parts = body.count(b"[") + body.count(b"{") + body.count(b'"') // 2
    return 2 * len(body) + PART_BYTES * num_parts + NUMBER_BYTES * body.count(b",")


class Occupant(Protocol):
    """A connection, as far as its place depends on it."""

    host: str
    began: float  # moment at which its request began to arrive

    @property
    def due(self) -> float:
        """Moment at which its request must have arrived."""

    def abort(self) -> None:
        """Close the connection at once."""

    def give_way(self) -> None:
        """Refuse the request that is arriving, and close the connection."""


class Occupancy:
    """Requests and connections of one address, or requests of all."""

    def __init__(self) -> None:
        self.num_open = self.num_bytes = 0  # of requests
        self.idle: dict[Occupant, None] = {}
        self.arriving: dict[Occupant, None] = {}  # both oldest first

    @property
    def is_empty(self) -> bool:
        return not (self.num_open or self.idle)


class Places:
    """Connections of one server, by what they do.

    - idle: no request whose headers have arrived waits for its response
    - open: there is such a request; it is arriving, until its body has arrived
    """

    def __init__(self, max_connections: int, max_requests: int, max_bytes: int) -> None:
        """max_bytes: of open requests, from the first byte of each to the end of its response."""
        self._max_connections, self._max_requests = max_connections, max_requests
        self._max_bytes = max_bytes
        self._open: dict[Occupant, int] = {}  # connections with a request → its bytes
        self._num_idle = 0
        self._total = Occupancy()
        self._shares: dict[str, Occupancy] = {}  # of addresses

    def connect(self, new: Occupant) -> Occupant | None:
        """Add a connection. Return an idle one that is to be closed in its place."""
        self.rest(new)
        if self._num_idle + len(self._open) <= self._max_connections:
            return None
        most = max(self._shares.values(), key=lambda share: len(share.idle))
        return next(iter(most.idle))

    def rest(self, occupant: Occupant) -> None:
        """End what the requests of a connection have: it is idle."""
        self.leave(occupant)
        self._share(occupant).idle[occupant] = None
        self._num_idle += 1

    def begin(self, occupant: Occupant, must_have: bool) -> bool:
        """Give a place to a request whose headers have arrived, and make others give way.

        Return False if all others are being answered, unless the request must have a place.
        """
        if occupant in self._open:
            return True  # an earlier request of the connection is being answered
        self.leave(occupant)
        share = self._share(occupant)
        while exceeds(1, share.num_open, self._total.num_open, self._max_requests):
            if not self._take_place(lambda share: len(share.arriving), lambda other: other.due):
                if must_have:
                    break
                return False
        self._shares[occupant.host] = share
        self._open[occupant] = 0
        self._count(share, 1, 0)
        self.arrives(occupant)
        return True

    def arrives(self, occupant: Occupant) -> None:
        """Let a request that has a place give way to others until it has `arrived`."""
        self._shares[occupant.host].arriving[occupant] = None

    def grow(self, occupant: Occupant, num_bytes: int) -> bool:
        """Count bytes of a request; False if there is no place for them."""
        if occupant not in self._open:
            return True  # it is answered already, so nothing is kept
        share = self._shares[occupant.host]
        while exceeds(num_bytes, share.num_bytes, self._total.num_bytes, self._max_bytes):
            if not self._take_place(
                lambda share: share.num_bytes, lambda other: other.began, occupant
            ):
                return False
        self._open[occupant] += num_bytes
        self._count(share, 0, num_bytes)
        return True

    def arrived(self, occupant: Occupant) -> None:
        if share := self._shares.get(occupant.host):
            share.arriving.pop(occupant, None)

    def leave(self, occupant: Occupant) -> None:
        """Forget a connection."""
        share = self._shares.get(occupant.host)
        if share is None:
            return
        self._num_idle -= occupant in share.idle
        share.idle.pop(occupant, None)
        share.arriving.pop(occupant, None)
        if (num_bytes := self._open.pop(occupant, None)) is not None:
            self._count(share, -1, -num_bytes)
        if share.is_empty:
            del self._shares[occupant.host]

    def _share(self, occupant: Occupant) -> Occupancy:
        return self._shares.setdefault(occupant.host, Occupancy())

    def _count(self, share: Occupancy, num_open: int, num_bytes: int) -> None:
        for counted in (share, self._total):
            counted.num_open += num_open
            counted.num_bytes += num_bytes

    def _take_place(
        self,
        size: Callable[[Occupancy], int],
        key: Callable[[Occupant], float],
        taker: Occupant | None = None,
    ) -> bool:
        """Make an arriving request give way, of the address with the largest size.

        Return False if there is none but the taker's. Of the oldest requests, the one with the
        lowest key gives way.
        """
        shares = [share for share in self._shares.values() if _others(share, taker)]
        if not shares:
            return False
        oldest = islice(max(shares, key=size).arriving, MAX_EXAMINED)
        found = min((occupant for occupant in oldest if occupant is not taker), key=key)
        self.leave(found)
        found.give_way()
        return True


def _others(share: Occupancy, taker: Occupant | None) -> bool:
    return len(share.arriving) > (taker in share.arriving)
