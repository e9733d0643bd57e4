"""Peers that registered with this process.

They follow the Paranoid Pirate pattern of the ZeroMQ guide, chapter 4: a peer registers with a
heartbeat, and any message counts as a heartbeat. A silent peer is busy or dead: only the
registration of its successor shows that it died.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.protocol.transport.process import Identity

MAX_SILENT = 16  # silent peers that are remembered, newest first: some get no successor
Work = TypeVar("Work")
Memory = TypeVar("Memory")


class Peer(Generic[Work]):
    """A process that registered, and its work by key."""

    def __init__(self, identity: bytes, name: str) -> None:
        self.identity = identity
        self.name = name
        self.work: dict[object, Work] = {}
        self.num_bytes = 0  # of the work, if its owner counts them
        self.num_missed = 0  # heartbeats of this process since the peer's latest message


class Peers(Generic[Work, Memory]):
    """All peers of one kind, by identity, and memories of silent peers."""

    def __init__(self) -> None:
        self._peers: dict[bytes, Peer[Work]] = {}
        self.remembered: dict[bytes, Memory] = {}

    def __iter__(self) -> Iterator[Peer[Work]]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, identity: bytes | None) -> Peer[Work] | None:
        return self._peers.get(identity) if identity else None

    def alive(self, identity: bytes, name: str) -> bool:
        """Note a message of a peer. Return True for its first message."""
        self.remembered.pop(identity, None)
        known = self._peers.get(identity)
        if known is None:
            self._peers[identity] = Peer(identity, name)
            return True
        known.num_missed = 0
        return False

    def lost(self, identity: bytes) -> list[Work]:
        peer = self._peers.pop(identity, None)
        return list(peer.work.values()) if peer else []

    def silent(self) -> list[bytes]:
        """Return peers that missed MAX_MISSED_HEARTBEATS heartbeats; called at each heartbeat.

        Heartbeats are counted, not seconds: while this process itself is stopped, no peer is late.
        """
        for peer in self._peers.values():
            peer.num_missed += 1
        return [peer.identity for peer in self if peer.num_missed > MAX_MISSED_HEARTBEATS]

    def remember(self, identity: bytes, memory: Memory) -> None:
        """Remember a silent peer until it returns, or its successor registers."""
        self.remembered[identity] = memory
        while len(self.remembered) > MAX_SILENT:
            del self.remembered[next(iter(self.remembered))]

    def predecessors(self, identity: bytes) -> list[bytes]:
        """Return earlier incarnations of a peer that registered: they have died."""
        new, others = Identity.decode(identity), [*self.remembered, *self._peers]
        known = ((Identity.decode(routing_id), routing_id) for routing_id in others)
        return [
            routing_id
            for old, routing_id in known
            if old.name == new.name and old.incarnation < new.incarnation
        ]

    def least_loaded(self) -> Peer[Work] | None:
        """Return the peer with the least work, or None without peers."""
        return min(self._peers.values(), key=lambda peer: len(peer.work), default=None)
