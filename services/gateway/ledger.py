"""The ledger: every accepted request, with all that is needed to begin it again."""

from itertools import count

from penstock.protocol.messages.client import (
    ErrorReply,
    GenerateReply,
    TextDelta,
)
from penstock.services.gateway.entry import Entry


class Ledger:
    """All requests by id, open or answered, until the client has the answer.

    `num_bytes` is of all of them. `num_waiting` open ones have no output yet; their prompts have
    `num_waiting_tokens`. `num_started` is how many have had their first token since the start.
    No two attempts have the same number, whichever request and gateway they are of.
    """

    def __init__(self, first_attempt: int = 0) -> None:
        self.first_attempt = first_attempt
        self._attempts = count(first_attempt)
        self._open: dict[str, Entry] = {}
        self._answered: dict[str, Entry] = {}
        self.num_bytes = self.num_waiting = self.num_waiting_tokens = self.num_started = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._answered)

    @property
    def num_open(self) -> int:
        """Requests that are not answered: an answer that nobody fetches is no work any more."""
        return len(self._open)

    def get(self, request_id: str) -> Entry | None:
        """The entry of an open request."""
        return self._open.get(request_id)

    def find(self, request_id: str) -> Entry | None:
        """The entry of a request, which may be answered, but not to its client yet."""
        return self._open.get(request_id) or self._answered.get(request_id)

    def add(self, entry: Entry) -> None:
        """A request was accepted."""
        self.begin_attempt(entry)
        self._open[entry.request_id] = entry
        entry.share.num_open += 1
        self.num_waiting += 1
        self._count(entry, entry.num_waiting_tokens, entry.num_bytes)

    def tokenized(self, entry: Entry, num_prompt_tokens: int) -> None:
        """The length of a prompt is known."""
        entry.num_prompt_tokens = num_prompt_tokens
        if entry.num_waiting_tokens:
            self._count(entry, num_prompt_tokens - entry.num_waiting_tokens)
            entry.num_waiting_tokens = num_prompt_tokens

    def append(self, entry: Entry, delta: TextDelta) -> bool:
        """As `Entry.append`."""
        before = entry.num_bytes
        is_new = entry.append(delta)
        self._count(entry, num_bytes=entry.num_bytes - before)
        if entry.num_waiting_tokens and entry.token_ids:
            self._wait_no_more(entry)
            self.num_started += 1
        return is_new

    def answer(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        """The request has ended; it stays until its client has the reply."""
        entry.answer = reply
        entry.is_open = False
        self._wait_no_more(entry)
        entry.share.num_open -= 1
        self._answered[entry.request_id] = self._open.pop(entry.request_id)

    def close(self, entry: Entry) -> None:
        """The client has its answer, or nobody wants it."""
        entry.is_open = False
        self._wait_no_more(entry)
        was_open = self._open.pop(entry.request_id, None)
        entry.share.num_open -= was_open is not None
        if was_open or self._answered.pop(entry.request_id, None):
            self._count(entry, num_bytes=-entry.num_bytes)

    def begin_attempt(self, entry: Entry) -> None:
        """What comes of an earlier attempt counts no more."""
        entry.attempt = next(self._attempts)
        entry.num_attempts += 1
        entry.tokenizer = b""

    def new_first_attempt(self) -> int:
        """A number below those of all attempts that begin from here on, above those before."""
        return next(self._attempts)

    def from_tokenizer(self, identity: bytes) -> list[Entry]:
        """Open requests that it has passed on, of which nothing has come since."""
        return [entry for entry in self._open.values() if entry.tokenizer == identity]

    def _count(self, entry: Entry, num_tokens: int = 0, num_bytes: int = 0) -> None:
        """Of prompts that wait, and of all; in total and for the client."""
        self.num_waiting_tokens += num_tokens
        self.num_bytes += num_bytes
        entry.share.num_waiting_tokens += num_tokens
        entry.share.num_bytes += num_bytes

    def _wait_no_more(self, entry: Entry) -> None:
        if entry.num_waiting_tokens:
            self.num_waiting -= 1
            self._count(entry, -entry.num_waiting_tokens)
            entry.num_waiting_tokens = 0
