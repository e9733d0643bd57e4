"""The pool of tokenizers: each request or query goes to the tokenizer with the least work.

Suspects, which may have killed a tokenizer, get a tokenizer for themselves.
"""

from collections.abc import Callable
from typing import Any

from penstock.protocol.fair_queue import FairQueue
from penstock.protocol.poison import MAX_DEATHS, PoisonList, Suspects, digest_of
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.peers import Peer, Peers
from penstock.protocol.transport.process import Identity
from penstock.services.gateway.ledger import Work
from penstock.services.gateway.request import WorkRequest

# Limit on the work of one tokenizer, unless it has a single request or query. Work that waits in
# the gateway can still be dropped.
MAX_BYTES = 1 << 17
_LOST = 1 << 32  # subtracted from priorities; larger than any difference of priorities
# Fields that do not change the work of a tokenizer: requests that differ only here are equal.
_IGNORED_FIELDS = {
    *("seed", "request_id", "stream", "timeout", "priority", "client"),
    "output_token_ids",
}


class TokenizerPoison:
    """Suspects, which may have killed a tokenizer, and poison requests, by digest.

    When a tokenizer dies, all its requests and queries become suspects. A suspect gets a tokenizer
    for itself until the tokenizer has processed it. A suspect that was a tokenizer's only work at
    MAX_DEATHS deaths is poison and fails.
    """

    def __init__(self, reports: DeathReports) -> None:
        self._reports = reports
        self.known = PoisonList()  # empty until a tokenizer has died
        self.suspects: Suspects[Work] = Suspects()

    def num_deaths(self, message: WorkRequest) -> int:
        """Return the number of tokenizer deaths at which an equal request was the only work."""
        return self.known.num_deaths(digest(message))

    def is_poison(self, message: WorkRequest) -> bool:
        return self.num_deaths(message) >= MAX_DEATHS

    def suspect_if_known(self, work: Work) -> None:
        """Suspect new work if an equal request was the only work at a tokenizer's death."""
        if num_deaths := self.num_deaths(work.message):
            self.suspects[work] = num_deaths

    def keeps_apart(self, work: Work, others: list[Work]) -> bool:
        """Return whether `work`, or the only element of `others`, is a suspect."""
        return work in self.suspects or (len(others) == 1 and others[0] in self.suspects)

    def blame(self, tokenizer: bytes, lost: list[Work]) -> Work | None:
        """Suspect the work of a dead tokenizer (a routing id). Return the poison work, if any."""
        dead = Identity.decode(tokenizer)
        self._reports.died([(dead.name, dead.pid)], [digest(work.message) for work in lost])
        self.suspects.add(lost)
        if len(lost) != 1:
            return None
        poison = self.suspects.blame(lost)
        self.known.put(digest(lost[0].message), self.suspects[lost[0]])
        return poison[0] if poison else None

    def clear(self, work: Work) -> None:
        """Clear a suspect that a tokenizer has processed, with the deaths of equal requests."""
        if self.suspects.pop(work, None) is not None:
            self.known.put(digest(work.message), 0)
            self._reports.clear([digest(work.message)])

    def learn(self, digests: list[bytes]) -> None:
        """Refuse poison requests of an earlier gateway, whose digests the supervisor reports."""
        for poison in digests:
            self.known.put(poison, MAX_DEATHS)

    def give_up(self, message: WorkRequest) -> bytes:
        """Refuse equal requests from now on. Return the request's digest."""
        poison = digest(message)
        self.known.put(poison, MAX_DEATHS)
        self._reports.found(poison)
        return poison


def digest(message: WorkRequest) -> bytes:
    """Return a digest of the fields that tokenizers use: equal requests have equal digests."""
    fields = [field for field in message.__struct_fields__ if field not in _IGNORED_FIELDS]
    return digest_of(type(message).__name__, [getattr(message, field) for field in fields])


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
        return peer.num_bytes + work.size <= MAX_BYTES

    def _send(self, work: Work, peer: Peer[Work]) -> None:
        peer.work[work.key] = work
        peer.num_bytes += work.size
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
            peer.num_bytes -= work.size
        return work
