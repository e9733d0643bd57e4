"""The pool of tokenizers: each request or query goes to the tokenizer with the least work.

Suspects, which may have killed a tokenizer, get a tokenizer for themselves; see `TokenizerPoison`.
"""

from collections.abc import Callable
from typing import Any

from penstock.protocol.fair_queue import FairQueue
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.peers import Peer, Peers
from penstock.services.gateway.ledger import Work
from penstock.services.gateway.poison import TokenizerPoison

# Limit on the work of one tokenizer, unless it has a single request or query. Work that waits in
# the gateway can still be dropped.
MAX_BYTES = 1 << 17
_LOST = 1 << 32  # subtracted from priorities; larger than any difference of priorities


class Tokenizers:
    """All tokenizers with their work, and a fair queue of unassigned work."""

    def __init__(
        self,
        channel: Channel[Any],
        poison: TokenizerPoison,
        *,
        on_lost: Callable[[bytes], None],
        on_poison: Callable[[Work], None],
        on_defect: Callable[[Work], None],
    ) -> None:
        """Make an empty pool.

        on_lost: called with the identity of a lost tokenizer, after its work was requeued.
        on_defect: fails a request or query, in an `except` block.
        """
        self.peers: Peers[Work, list[Work]] = Peers()
        self.unassigned: FairQueue[Work] = FairQueue()
        self._num_losses = 0
        self._num_bytes: dict[bytes, int] = {}  # bytes of each tokenizer's work
        self._channel = channel
        self._poison = poison
        self._on_lost, self._on_poison, self._on_defect = on_lost, on_poison, on_defect

    def submit(self, work: Work) -> None:
        """Queue work, and send it as soon as a tokenizer has room."""
        if self._poison.known:
            self._poison.suspect_if_known(work)
        self._enqueue(work, work.priority)
        self._assign()

    def alive(self, identity: bytes, name: str) -> None:
        """Record a heartbeat. The first heartbeat registers the tokenizer."""
        if self.peers.alive(identity, name):
            self._num_bytes[identity] = 0
            for dead in self.peers.predecessors(identity):
                if dead in self.peers.remembered:
                    self._blame(dead, self.peers.remembered.pop(dead))
                else:
                    self.lose(dead)
            self._assign()

    def lose_silent(self) -> None:
        """Remove tokenizers that missed too many heartbeats. Called at each heartbeat."""
        for identity in self.peers.silent():
            if lost := self.lose(identity, has_died=False):
                self.peers.remember(identity, lost)

    def done(self, identity: bytes, key: object) -> None:
        """Record that a tokenizer is done with a request or query, successfully or not."""
        silent = self.peers.remembered
        for silent_peer, lost in list(silent.items()):
            silent[silent_peer] = [work for work in lost if work.key != key]
            if not silent[silent_peer]:
                del silent[silent_peer]
        if peer := self.peers.get(identity):
            work = self._take_back(peer, key)
            if work and self._poison.suspects:
                self._poison.clear(work)
            self._assign()

    def forget(self, work: Work) -> None:
        """Remove work from the queue. A tokenizer that already has the work reports it as done."""
        self.unassigned.remove(work)

    def lose(self, identity: bytes, has_died: bool = True) -> list[Work]:
        """Remove a tokenizer. Return its work, which is requeued ahead of other work."""
        had = self.peers.lost(identity)
        if has_died and had:
            had = self._blame(identity, had)
        self._enqueue_first(had)
        self._num_bytes.pop(identity, None)
        self._on_lost(identity)
        self._assign()
        return had

    def _blame(self, identity: bytes, lost: list[Work]) -> list[Work]:
        """Suspect the work of a dead tokenizer. Return the work to retry."""
        if poison := self._poison.blame(identity, lost):
            self.forget(poison)
            self._on_poison(poison)
            return []
        return lost

    def _assign(self) -> None:
        while work := self.unassigned.first():
            if not work.is_open:
                self.unassigned.remove(work)
                continue
            having_room = [peer for peer in self.peers if self._has_room(peer, work)]
            if not having_room:
                return
            self.unassigned.take()
            self._send(work, min(having_room, key=lambda peer: len(peer.work)))

    def _enqueue(self, work: Work, priority: int) -> None:
        self.unassigned.remove(work)
        self.unassigned.add(work, work.turn, priority)

    def _enqueue_first(self, lost: list[Work]) -> None:
        self._num_losses += 1
        for work in lost:
            if work.is_open:
                self._enqueue(work, work.priority - _LOST * self._num_losses)

    def _has_room(self, peer: Peer[Work], work: Work) -> bool:
        if not peer.work:
            return True
        if self._poison.suspects and self._poison.keeps_apart(work, list(peer.work.values())):
            return False
        return self._num_bytes[peer.identity] + work.size <= MAX_BYTES

    def _send(self, work: Work, peer: Peer[Work]) -> None:
        peer.work[work.key] = work
        self._num_bytes[peer.identity] += work.size
        try:
            is_sent = self._channel.send(work.submission(), peer.identity)
        except Exception:  # noqa: BLE001
            self._take_back(peer, work.key)
            self._on_defect(work)
        else:
            if not is_sent:  # the tokenizer was already gone, so this work is not a suspect
                self._take_back(peer, work.key)
                self._enqueue_first([work])
                self.lose(peer.identity)

    def _take_back(self, peer: Peer[Work], key: object) -> Work | None:
        if work := peer.work.pop(key, None):
            self._num_bytes[peer.identity] -= work.size
        return work
