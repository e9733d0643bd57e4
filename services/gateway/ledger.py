"""The ledger of all open requests. No I/O."""

from itertools import count

from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.services.gateway.client import Connection, Totals
from penstock.services.gateway.entry import Entry


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
