"""The time in which clients may claim their requests from a restarted gateway."""

import math
from collections.abc import Iterable

from penstock.services.scheduler.sequences.sequence import Sequence


class Lease:
    """The lease of requests that an earlier gateway left running.

    `now` is in seconds, of any monotonic clock.
    """

    def __init__(self, timeout: float) -> None:
        self.first_attempt = 0  # of the newest gateway: earlier attempts belong to its predecessors
        self._timeout = timeout
        self._end = math.inf

    def begin(self, first_attempt: int, now: float) -> None:
        """Begin the lease of a gateway's start, unless a newer gateway is known."""
        if first_attempt > self.first_attempt:
            self.first_attempt = first_attempt
            self._end = now + self._timeout

    def unclaimed(self, requests: Iterable[Sequence]) -> list[Sequence]:
        """Return the requests that have a lease now."""
        if self._end == math.inf:
            return []
        return [one for one in requests if one.attempt < self.first_attempt]

    def take_expired(self, requests: Iterable[Sequence], now: float) -> list[Sequence]:
        """Return, once, the requests that no client has claimed when the lease ends."""
        if now < self._end:
            return []
        expired = self.unclaimed(requests)
        self._end = math.inf
        return expired
