"""Work on its way to tokenizers: each piece to the one that has the fewest."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from penstock.protocol.messages import Question, TokenizeRequest
from penstock.protocol.peers import Peer, Peers
from penstock.protocol.sockets import Channel

log = logging.getLogger("gateway")
MAX_BYTES = 1 << 17
"""of work that one tokenizer has at a time, unless it is one piece: what nobody waits for any more
is dropped here, and can't be once a tokenizer has it"""


class Work(Protocol):
    """A request, or a question that a tokenizer answers alone."""

    @property
    def key(self) -> object:
        """Names it, and its attempt, to the tokenizer."""

    @property
    def size(self) -> int:
        """About as many bytes are to be tokenized."""

    @property
    def is_open(self) -> bool:
        """Somebody waits for it."""

    def submission(self) -> TokenizeRequest | Question:
        """What the tokenizer is sent."""


class Tokenizers:
    """Which tokenizer has which work; what none has room for waits here, oldest first."""

    def __init__(
        self,
        channel: Channel[Any],
        on_change: Callable[[], None],
        on_lost: Callable[[bytes], None] = lambda _: None,
        on_defect: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """`on_change` is called when a tokenizer has come or is lost; `on_lost` with the identity
        of a lost one; `on_defect` in an `except` block, with work that can't be sent."""
        self.peers: Peers[Work] = Peers()
        self.unassigned: dict[Work, None] = {}
        self._num_bytes: dict[bytes, int] = {}
        """by tokenizer, of the work it has"""
        self._channel = channel
        self._on_change = on_change
        self._on_lost = on_lost
        self._on_defect = on_defect

    def check(self, submission: TokenizeRequest | Question) -> None:
        """Raises one of UNREADABLE if `submission` can't be encoded."""
        self._channel.encode(submission)

    def submit(self, work: Work) -> None:
        """Gives work away, now or when a tokenizer has room."""
        self.unassigned[work] = None
        self._assign()

    def alive(self, identity: bytes, name: str) -> None:
        """A heartbeat came; the first one of a tokenizer makes it take part."""
        if self.peers.alive(identity, name):
            self._num_bytes[identity] = 0
            self._assign()
            self._on_change()

    def done(self, identity: bytes, key: object) -> None:
        """A tokenizer has passed a request on, answered a question, or failed at it."""
        if peer := self.peers.get(identity):
            self._take_back(peer, key)
            self._assign()

    def forget(self, work: Work) -> None:
        """Nobody waits for it any more. A tokenizer that has it still reports it as done."""
        self.unassigned.pop(work, None)

    def lose(self, identity: bytes) -> None:
        """Its unanswered work goes first to another one, or to the next that comes."""
        lost = {work: None for work in self.peers.lost(identity) if work.is_open}
        self._num_bytes.pop(identity, None)
        self.unassigned = lost | self.unassigned
        self._on_lost(identity)
        self._assign()
        self._on_change()

    def _assign(self) -> None:
        """Sends what waits, as long as there is room."""
        while self.unassigned:
            work = next(iter(self.unassigned))
            if not work.is_open:
                del self.unassigned[work]
                continue
            having_room = [peer for peer in self.peers if self._has_room(peer, work)]
            if not having_room:
                return
            del self.unassigned[work]
            self._send(work, min(having_room, key=lambda peer: len(peer.work)))

    def _has_room(self, peer: Peer[Work], work: Work) -> bool:
        return not peer.work or self._num_bytes[peer.identity] + work.size <= MAX_BYTES

    def _send(self, work: Work, peer: Peer[Work]) -> None:
        peer.work[work.key] = work
        self._num_bytes[peer.identity] += work.size
        try:
            is_sent = self._channel.send(work.submission(), peer.identity)
        except Exception:  # noqa: BLE001
            self._take_back(peer, work.key)
            self._on_defect(work)
        else:
            if not is_sent:
                self.lose(peer.identity)  # and submits this one again

    def _take_back(self, peer: Peer[Work], key: object) -> None:
        if work := peer.work.pop(key, None):
            self._num_bytes[peer.identity] -= work.size
