"""Places of HTTP requests: limits of open requests and of their bytes, shared between addresses.

No request waits for a place. If none is free, a request takes the place of the slowest request
that is still arriving, from the address with the most such requests, or is refused.
"""

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from penstock.protocol.fair_queue import exceeds

PART_BYTES = 64  # memory of a decoded list, map or string, in addition to its text
NUMBER_BYTES = 40  # memory of a decoded number in a list, and of its places in two lists
MAX_EXAMINED = 32  # requests that are compared to find the slowest


def decoded_bytes(body: bytes) -> int:
    """Return an upper bound of the bytes that a JSON body takes until its request is answered.

    The bytes are the texts, the copy for the gateway, and the parts. Each comma may follow a
    number.
    """
    num_parts = body.count(b"[") + body.count(b"{") + body.count(b'"') // 2
    return 2 * len(body) + PART_BYTES * num_parts + NUMBER_BYTES * body.count(b",")


class Occupant(Protocol):
    """A connection, with the properties that determine its place."""

    host: str
    began: float  # time at which the request began to arrive

    @property
    def due(self) -> float:
        """The time by which the request must have arrived."""

    def abort(self) -> None:
        """Close the connection at once."""

    def give_way(self) -> None:
        """Refuse the arriving request, and close the connection."""


class Occupancy:
    """Requests and connections of an address, or requests of all addresses."""

    def __init__(self) -> None:
        self.num_open = self.num_bytes = 0  # number and bytes of open requests
        self.idle: dict[Occupant, None] = {}
        self.arriving: dict[Occupant, None] = {}  # both dicts: oldest first

    @property
    def is_empty(self) -> bool:
        return not (self.num_open or self.idle)


class Places:
    """Connections of one server, by state.

    - idle: no request with complete headers waits for its response
    - open: such a request waits; the request is arriving until its body is complete
    """

    def __init__(self, max_connections: int, max_requests: int, max_bytes: int) -> None:
        """Start without connections.

        max_bytes: limit for open requests, from the first byte of each to the end of its response.
        """
        self._max_connections, self._max_requests = max_connections, max_requests
        self._max_bytes = max_bytes
        self._open: dict[Occupant, int] = {}  # connection with a request → bytes of the request
        self._num_idle = 0
        self._total = Occupancy()
        self._shares: dict[str, Occupancy] = {}  # by address

    def connect(self, new: Occupant) -> Occupant | None:
        """Add a connection. Return an idle connection to close in exchange, or None."""
        self.rest(new)
        if self._num_idle + len(self._open) <= self._max_connections:
            return None
        most = max(self._shares.values(), key=lambda share: len(share.idle))
        return next(iter(most.idle))

    def rest(self, occupant: Occupant) -> None:
        """Release the places of a connection's requests, and make the connection idle."""
        self.leave(occupant)
        self._share(occupant).idle[occupant] = None
        self._num_idle += 1

    def begin(self, occupant: Occupant, must_have: bool) -> bool:
        """Give a place to a request with complete headers, and make other requests give way.

        Return False if all other requests are being answered, unless the request must have a place.
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
        """Let a request with a place give way to other requests until it has `arrived`."""
        self._shares[occupant.host].arriving[occupant] = None

    def grow(self, occupant: Occupant, num_bytes: int) -> bool:
        """Count bytes of a request. Return False if there is no place for the bytes."""
        if occupant not in self._open:
            return True  # the request is answered already, so no bytes are kept
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
        """Make an arriving request give way, from the address with the largest size.

        Return False if only the taker's request is arriving. Among the oldest requests, the request
        with the lowest key gives way.
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
