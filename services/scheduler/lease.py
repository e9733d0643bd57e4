"""The time in which clients may ask a new gateway for what an old one has left running."""

import math
from collections.abc import Iterable

from penstock.protocol.messages.scheduler import TokenizedRequest
from penstock.services.scheduler.sequence import Sequence


class Lease:
    """No clock: `now` is in seconds, of any clock that does not go back."""

    def __init__(self, timeout: float) -> None:
        self.first_attempt = 0
        """of the newest gateway: what is before it belongs to one that is gone"""
        self._timeout = timeout
        self._end = math.inf

    def begin(self, first_attempt: int, now: float) -> None:
        """A gateway has started; news of one before the newest changes nothing."""
        if first_attempt > self.first_attempt:
            self.first_attempt = first_attempt
            self._end = now + self._timeout

    def unclaimed(self, requests: Iterable[TokenizedRequest | Sequence]) -> list[str]:
        """Returns the ids of those that have it now."""
        if self._end == math.inf:
            return []
        return [one.request_id for one in requests if one.attempt < self.first_attempt]

    def ends(self, now: float) -> bool:
        """True once, when the time is over: what nobody has asked for may go."""
        is_over = now >= self._end
        if is_over:
            self._end = math.inf
        return is_over
