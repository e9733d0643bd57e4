"""Work on its way to tokenizers: each piece to the one that has the fewest.

When a tokenizer dies, any of the work that it had may have killed it. Such suspects get a tokenizer
for themselves, until it has done them: who is alone at MAX_DEATHS deaths is given up.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from penstock.protocol.fair_queue import FairQueue
from penstock.protocol.messages.tokenizer import TokenizeRequest, TokenizerQuery
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.heartbeat import Peer, Peers
from penstock.services.gateway.poison import MAX_DEATHS, Asked, Poison
from penstock.services.gateway.shares import Share

log = logging.getLogger("gateway")
MAX_BYTES = 1 << 17
"""of work that one tokenizer has at a time, unless it is one piece: what nobody waits for any more
is dropped here, and can't be once a tokenizer has it"""

_LOST = 1 << 32
"""more than any difference of priorities"""


class Work(Protocol):
    """A request, or a question that a tokenizer answers alone."""

    @property
    def key(self) -> object:
        """Names it, and its attempt, to the tokenizer."""

    @property
    def size(self) -> int:
        """About as many bytes are to be tokenized."""

    @property
    def request(self) -> Asked:
        """What its client asks for."""

    @property
    def share(self) -> Share:
        """Of the client that waits for it."""

    @property
    def priority(self) -> int:
        """As in `GenerateRequest`."""

    @property
    def is_open(self) -> bool:
        """Somebody waits for it."""

    def submission(self) -> TokenizeRequest | TokenizerQuery:
        """What the tokenizer is sent."""


class Tokenizers:
    """Which tokenizer has which work; what none has room for waits here, in turns of clients."""

    def __init__(
        self,
        channel: Channel[Any],
        poison: Poison,
        on_change: Callable[[], None],
        on_lost: Callable[[bytes], None] = lambda _: None,
        on_defect: Callable[[Any], None] = lambda _: None,
        on_poison: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """`on_change` is called when a tokenizer has come or is lost; `on_lost` with the identity
        of a lost one; `on_defect` in an `except` block, with work that can't be sent; `on_poison`
        with work that is given up."""
        self.peers: Peers[Work] = Peers()
        self.unassigned: FairQueue[Work] = FairQueue()
        self._num_losses = 0
        self._num_bytes: dict[bytes, int] = {}
        """by tokenizer, of the work it has"""
        self._channel = channel
        self._on_change = on_change
        self._on_lost = on_lost
        self._on_defect = on_defect
        self._on_poison = on_poison
        self._poison = poison
        self._suspects: WeakKeyDictionary[Work, int] = WeakKeyDictionary()
        """→ deaths at which it was alone"""

    def check(self, submission: TokenizeRequest | TokenizerQuery) -> None:
        """Raises one of DECODE_ERRORS if `submission` can't be encoded."""
        self._channel.encode(submission)

    def submit(self, work: Work) -> None:
        """Gives work away, now or when a tokenizer has room."""
        if num_deaths := self._poison.num_deaths(work.request):
            self._suspects[work] = num_deaths
        self._add(work, work.priority)
        self._assign()

    def alive(self, identity: bytes, name: str) -> None:
        """A heartbeat came; the first one of a tokenizer makes it take part."""
        if self.peers.alive(identity, name):
            self._num_bytes[identity] = 0
            for dead in self.peers.predecessors(identity):
                self.lose(dead)
            self._assign()
            self._on_change()

    def done(self, identity: bytes, key: object) -> None:
        """A tokenizer has passed a request on, answered a question, or failed at it."""
        if peer := self.peers.get(identity):
            work = self._take_back(peer, key)
            if work and self._suspects.pop(work, 0):
                self._poison.suspect(work.request, 0)
            self._assign()

    def forget(self, work: Work) -> None:
        """Nobody waits for it any more. A tokenizer that has it still reports it as done."""
        self.unassigned.remove(work)

    def lose(self, identity: bytes, has_died: bool = True) -> None:
        """Its unanswered work goes to another one, or to the next that comes, first of each
        client's."""
        had = self.peers.lost(identity)
        if has_died and had:
            had = self._blame(identity, had)
        self._add_first(had)
        self._num_bytes.pop(identity, None)
        self._on_lost(identity)
        self._assign()
        self._on_change()

    def _blame(self, identity: bytes, lost: list[Work]) -> list[Work]:
        """A tokenizer died with this work. Return what is to be tried again."""
        self._poison.died(identity, [work.request for work in lost])
        for work in lost:
            self._suspects.setdefault(work, 0)
        if len(lost) == 1:
            self._suspects[work] += 1
            self._poison.suspect(work.request, self._suspects[work])
            if self._suspects[work] >= MAX_DEATHS:
                self._on_poison(work)
                return []
        return lost

    def _assign(self) -> None:
        """Sends what waits, as long as there is room."""
        while work := self.unassigned.first():
            if not work.is_open:
                self.unassigned.remove(work)
                continue
            having_room = [peer for peer in self.peers if self._has_room(peer, work)]
            if not having_room:
                return
            self.unassigned.take()
            self._send(work, min(having_room, key=lambda peer: len(peer.work)))

    def _add(self, work: Work, priority: int) -> None:
        self.unassigned.remove(work)
        self.unassigned.add(work, work.share.name, priority)

    def _add_first(self, lost: list[Work]) -> None:
        """Before all other work of the same clients."""
        self._num_losses += 1
        for work in lost:
            if work.is_open:
                self._add(work, work.priority - _LOST * self._num_losses)

    def _has_room(self, peer: Peer[Work], work: Work) -> bool:
        if not peer.work:
            return True
        if self._suspects and (work in self._suspects or self._has_suspect(peer)):
            return False
        return self._num_bytes[peer.identity] + work.size <= MAX_BYTES

    def _has_suspect(self, peer: Peer[Work]) -> bool:
        """A suspect is alone."""
        return len(peer.work) == 1 and next(iter(peer.work.values())) in self._suspects

    def _send(self, work: Work, peer: Peer[Work]) -> None:
        peer.work[work.key] = work
        self._num_bytes[peer.identity] += work.size
        try:
            is_sent = self._channel.send(work.submission(), peer.identity)
        except Exception:  # noqa: BLE001
            self._take_back(peer, work.key)
            self._on_defect(work)
        else:
            if not is_sent:  # nobody died of this one
                self._take_back(peer, work.key)
                self._add_first([work])
                self.lose(peer.identity)

    def _take_back(self, peer: Peer[Work], key: object) -> Work | None:
        if work := peer.work.pop(key, None):
            self._num_bytes[peer.identity] -= work.size
        return work
