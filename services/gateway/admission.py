"""How much the gateway lets in, and when it goes better."""

from collections import deque

from penstock.protocol.config import Config
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.shares import Share, is_too_much
from penstock.services.gateway.tokenizer_queries import Questions
from penstock.services.gateway.validation import RefusedError

NUM_SAMPLES = 20
"""heartbeats over which the rate of starts is taken"""
MAX_RETRY_AFTER = 60.0
"""seconds"""


class Overload:
    """Limits on what the gateway holds, in requests and questions, prompt tokens and bytes.

    What counts has been confirmed: a prompt's tokens by the tokenizer, its start by the first token
    that came out. A refused client is told in how many seconds what waits now will have started, at
    the rate of the last NUM_SAMPLES heartbeats; 1 to 60, and 1 where nothing started in them.
    When one client has filled a limit, a few more are left for others: see `is_too_much`.
    """

    def __init__(self, config: Config, ledger: Ledger, questions: Questions) -> None:
        self._ledger = ledger
        self._questions = questions
        self._max_requests = config.max_running + config.max_waiting_requests
        self._max_waiting_tokens = config.max_waiting_tokens
        self._max_open_bytes = config.max_open_bytes
        self._starts: deque[tuple[float, int]] = deque(maxlen=NUM_SAMPLES)
        """(moment, requests started until then)"""

    def sample(self, now: float) -> None:
        """To be called every heartbeat; `now` in seconds of one clock."""
        self._starts.append((now, self._ledger.num_started))

    def check(self, num_bytes: int, num_tokens: int, share: Share) -> None:
        """Whether a request or a question of so many bytes and prompt tokens may come in. Raises
        RefusedError."""
        ledger, questions = self._ledger, self._questions
        num_open = ledger.num_open + len(questions)
        if is_too_much(1, share.num_open, num_open, self._max_requests):
            raise self._refusal(f"{num_open} requests are open; the limit is {self._max_requests}")
        waiting, limit = ledger.num_waiting_tokens + questions.num_tokens, self._max_waiting_tokens
        is_over = is_too_much(num_tokens, share.num_waiting_tokens, waiting, limit)
        if waiting and num_tokens and is_over:
            raise self._refusal(
                f"{waiting + num_tokens} prompt tokens would wait, {num_tokens} of this request; "
                f"the limit is {limit}"
            )
        open_bytes = ledger.num_bytes + questions.num_bytes
        if is_too_much(num_bytes, share.num_bytes, open_bytes, self._max_open_bytes):
            raise self._refusal(
                f"open requests and their answers have {open_bytes} bytes, this request has "
                f"{num_bytes}; the limit is {self._max_open_bytes}"
            )

    def _refusal(self, reason: str) -> RefusedError:
        return RefusedError(
            f"overloaded: {reason}", code="overloaded", retry_after=self._retry_after()
        )

    def _retry_after(self) -> float:
        if not self._starts:
            return 1.0
        (begin, before), (end, now) = self._starts[0], self._starts[-1]
        if now == before:
            return 1.0
        seconds = self._ledger.num_waiting * (end - begin) / (now - before)
        return min(max(1.0, seconds), MAX_RETRY_AFTER)
