"""Work on its way to tokenizers: each piece to the one that has the fewest."""

from collections.abc import Callable
from typing import Any, Protocol

from penstock.protocol.messages import Question, TokenizeRequest
from penstock.protocol.peers import Peers
from penstock.protocol.sockets import Channel


class Work(Protocol):
    """A request, or a question that a tokenizer answers alone."""

    @property
    def key(self) -> object:
        """Names it, and its attempt, to the tokenizer."""

    @property
    def is_open(self) -> bool:
        """Somebody waits for it."""

    def submission(self) -> TokenizeRequest | Question:
        """What the tokenizer is sent."""


class Tokenizers:
    """Which tokenizer has which work; what no tokenizer has waits for one to come."""

    def __init__(
        self,
        channel: Channel[Any],
        on_change: Callable[[], None],
        on_lost: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`on_change` is called when one has come or is gone; `on_lost` with the identity of one
        that is."""
        self.peers: Peers[Work] = Peers()
        self.unassigned: dict[Work, None] = {}
        self._channel = channel
        self._on_change = on_change
        self._on_lost = on_lost

    def submit(self, work: Work) -> None:
        """Gives work away."""
        if peer := self.peers.least_loaded():
            peer.work[work.key] = work
            if not self._channel.send(work.submission(), peer.identity):
                self.lose(peer.identity)  # and submits this one again
        else:
            self.unassigned[work] = None

    def alive(self, identity: bytes, name: str) -> None:
        """A heartbeat came; the first one of a tokenizer makes it take part."""
        if self.peers.alive(identity, name):
            self._submit_unassigned()

    def done(self, identity: bytes, key: object) -> None:
        """A tokenizer has passed a request on, answered a question, or failed at it."""
        if peer := self.peers.get(identity):
            peer.work.pop(key, None)

    def forget(self, work: Work) -> None:
        """Nobody waits for it any more. A tokenizer that has it still reports it as done."""
        self.unassigned.pop(work, None)

    def lose(self, identity: bytes) -> None:
        """Its unanswered work goes to another one, or to the next that comes."""
        self.unassigned |= {work: None for work in self.peers.lost(identity) if work.is_open}
        self._on_lost(identity)
        self._submit_unassigned()

    def _submit_unassigned(self) -> None:
        unassigned, self.unassigned = self.unassigned, {}
        for work in unassigned:
            self.submit(work)
        self._on_change()
