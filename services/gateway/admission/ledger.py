"""The ledger of all open requests, and admission control: limits on what it holds. No I/O."""

from collections import deque
from itertools import count

from penstock.protocol.config import Config
from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.services.gateway.admission.client import Connection, Share, Totals
from penstock.services.gateway.admission.entry import Entry
from penstock.services.gateway.admission.validation import RefusedError

NUM_SAMPLES = 20
"""heartbeats over which the rate of starts is measured"""
MAX_RETRY_AFTER = 60.0
"""seconds"""
RESERVED = 8
"""one more place for every N places of a limit is kept for clients that have few"""


class Ledger:
    """All requests by id, open or answered, until the client has the answer.

    The number of an attempt is unique across requests and gateways.
    """

    def __init__(self, first_attempt: int = 0) -> None:
        self.first_attempt = first_attempt
        self._attempts = count(first_attempt)
        self._entries: dict[str, Entry] = {}
        self._lost: dict[Entry, Connection] = {}  # closed at the last heartbeat

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_open(self) -> int:
        return sum(entry.is_open for entry in self._entries.values())

    def num_of_model(self, totals: Totals) -> int:
        """Return the number of requests that `__len__` counts, of the model with these totals."""
        return sum(entry.totals is totals for entry in self._entries.values())

    def get(self, request_id: str) -> Entry | None:
        """Return the entry of a request that is open."""
        entry = self._entries.get(request_id)
        return entry if entry and entry.is_open else None

    def find(self, request_id: str) -> Entry | None:
        """Return the entry of a request that is open, or whose answer is not delivered yet."""
        return self._entries.get(request_id)

    def open(self, entry: Entry, totals: Totals) -> None:
        """Add a request, which counts in the totals of its model."""
        entry.totals = totals
        self.begin_attempt(entry)
        self._entries[entry.request_id] = entry
        entry.totals.num_waiting += 1
        entry.totals.count(entry.share, 1, entry.num_waiting_tokens, entry.num_bytes)

    def record_tokenized(self, entry: Entry, num_prompt_tokens: int, tokenizer: bytes) -> None:
        """Record that a tokenizer has passed a prompt on."""
        entry.num_prompt_tokens, entry.tokenizer = num_prompt_tokens, tokenizer
        if entry.num_waiting_tokens:
            num_new = num_prompt_tokens - entry.num_waiting_tokens
            entry.totals.count(entry.share, num_tokens=num_new)
            entry.num_waiting_tokens = num_prompt_tokens

    def record_growth(self, entry: Entry, num_bytes: int) -> None:
        """Count the output of a request that had `num_bytes` before."""
        num_new = entry.num_bytes - num_bytes
        entry.totals.num_bytes += num_new
        entry.share.num_bytes += num_new
        if entry.num_waiting_tokens and num_new:
            self._stop_waiting(entry)
            entry.totals.num_started += 1

    def answer(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        """End a request, which stays until its client has the reply."""
        entry.answer = reply
        self._end(entry)

    def remove(self, entry: Entry) -> None:
        self._end(entry)
        if self._entries.pop(entry.request_id, None):
            entry.totals.count(entry.share, num_bytes=-entry.num_bytes)

    def begin_attempt(self, entry: Entry) -> None:
        """Begin a new attempt: output of earlier attempts is dropped."""
        entry.attempt = next(self._attempts)
        entry.num_attempts += 1
        entry.tokenizer = b""

    def new_first_attempt(self) -> int:
        """Return a number below all later attempts and above all earlier ones."""
        return next(self._attempts)

    def passed_on_by(self, tokenizer: bytes) -> list[Entry]:
        """Return open requests that a tokenizer has sent to a scheduler and that have no output."""
        entries = self._entries.values()
        return [one for one in entries if one.is_open and one.tokenizer == tokenizer]

    def of_connection(self, connection: Connection) -> list[Entry]:
        """Return requests that are answered on a connection."""
        return [one for one in self._entries.values() if one.client.connection is connection]

    def take_lost(self) -> list[Entry]:
        """Return requests without an open connection at the last call, and still without one."""
        before = self._lost
        connections = ((entry, entry.client.connection) for entry in self._entries.values())
        self._lost = {entry: one for entry, one in connections if one.is_closed}
        return [one for one, connection in self._lost.items() if before.get(one) is connection]

    def _end(self, entry: Entry) -> None:
        self._stop_waiting(entry)
        if entry.is_open:
            entry.is_open = False
            entry.totals.count(entry.share, num_open=-1)

    def _stop_waiting(self, entry: Entry) -> None:
        if entry.num_waiting_tokens:
            entry.totals.num_waiting -= 1
            entry.totals.count(entry.share, num_tokens=-entry.num_waiting_tokens)
            entry.num_waiting_tokens = 0


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
        self._starts: deque[tuple[float, int]] = deque(maxlen=NUM_SAMPLES)
        """(moment, requests started until then)"""

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


def exceeds(new: int, own: int, total: int, limit: int) -> bool:
    """Return whether a client that has `own` of `total` things may not have `new` more.

    Up to the limit a client may have any number. Beyond the limit there are a few more places, of
    which a client may have as many as it leaves free: a client that has filled the limit gets none.
    """
    free = limit + -(-limit // RESERVED) - total
    return total + new > limit and not (own < free >= new)
