"""Admission control: limits on the open work of all clients, and of one. No I/O."""

from collections import deque

from penstock.protocol.config import Config
from penstock.protocol.fair_queue import exceeds
from penstock.services.gateway.client import Share, Totals
from penstock.services.gateway.validation import RefusedError

NUM_SAMPLES = 20  # heartbeats over which the rate of starts is measured
MAX_RETRY_AFTER = 60.0  # seconds


class Admission:
    """Limits on open requests and queries, waiting prompt tokens and bytes.

    A prompt's tokens are counted by the tokenizer, its start by the first token of output. A
    refused client is sent the seconds in which the work that waits now will have started, at the
    rate of the last NUM_SAMPLES heartbeats: 1 to 60, and 1 where nothing has started.
    When one client has filled a limit, a few places are left for others: see `exceeds`.
    """

    def __init__(self, config: Config, totals: Totals) -> None:
        self._totals = totals
        self._max_requests = config.max_running + config.max_waiting_requests
        self._max_waiting_tokens = config.max_waiting_tokens
        self._max_open_bytes = config.max_open_bytes
        # (moment, requests started until then)
        self._starts: deque[tuple[float, int]] = deque(maxlen=NUM_SAMPLES)

    def sample(self, now: float) -> None:
        """Measure the rate of starts, at every heartbeat; `now` in seconds of one clock."""
        self._starts.append((now, self._totals.num_started))

    def check(self, num_bytes: int, num_tokens: int, share: Share) -> None:
        """Raise RefusedError for a request or query of this size that may not be accepted."""
        totals = self._totals
        if exceeds(1, share.num_open, totals.num_open, self._max_requests):
            raise self._refusal(
                f"{totals.num_open} requests are open; the limit is {self._max_requests}"
            )
        waiting, limit = totals.num_waiting_tokens, self._max_waiting_tokens
        is_over = exceeds(num_tokens, share.num_waiting_tokens, waiting, limit)
        if waiting and num_tokens and is_over:
            raise self._refusal(
                f"{waiting + num_tokens} prompt tokens would wait, {num_tokens} of this request; "
                f"the limit is {limit}"
            )
        if exceeds(num_bytes, share.num_bytes, totals.num_bytes, self._max_open_bytes):
            raise self._refusal(
                f"open requests and their answers have {totals.num_bytes} bytes, this request has "
                f"{num_bytes}; the limit is {self._max_open_bytes}"
            )

    def _refusal(self, reason: str) -> RefusedError:
        seconds = 1.0
        if self._starts and (num_new := self._starts[-1][1] - self._starts[0][1]):
            elapsed = self._starts[-1][0] - self._starts[0][0]
            seconds = max(1.0, self._totals.num_waiting * elapsed / num_new)
        wait = min(seconds, MAX_RETRY_AFTER)
        return RefusedError(f"overloaded: {reason}", code="overloaded", retry_after=wait)
