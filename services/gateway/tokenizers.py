"""Requests on their way to tokenizers: each to the one that has the fewest."""

from collections.abc import Callable
from typing import Any

from penstock.protocol.peers import Peers
from penstock.protocol.sockets import Channel
from penstock.services.gateway.ledger import Entry, Ledger


class Tokenizers:
    """Which tokenizer has which request; what no tokenizer has waits for one to come."""

    def __init__(
        self, channel: Channel[Any], ledger: Ledger, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when one has come or is lost."""
        self.peers: Peers[Entry] = Peers()
        self.unassigned: dict[str, Entry] = {}
        self._channel = channel
        self._ledger = ledger
        self._on_change = on_change

    def submit(self, entry: Entry) -> None:
        """Gives a request away."""
        if peer := self.peers.least_loaded():
            peer.work[entry.request_id, entry.attempt] = entry
            if not self._channel.send(entry.submission(), peer.identity):
                self.lose(peer.identity)  # and submits this one again
        else:
            self.unassigned[entry.request_id] = entry

    def alive(self, identity: bytes, name: str) -> None:
        """A heartbeat came; the first one of a tokenizer makes it take part."""
        if self.peers.alive(identity, name):
            self._submit_unassigned()

    def done(self, identity: bytes, request_id: str, attempt: int) -> None:
        """A tokenizer has passed a request on, or failed at it."""
        if peer := self.peers.get(identity):
            peer.work.pop((request_id, attempt), None)

    def forget(self, entry: Entry) -> None:
        """The request has ended. A tokenizer that has it still reports it as done."""
        self.unassigned.pop(entry.request_id, None)

    def lose(self, identity: bytes) -> None:
        """Its unanswered requests go to another one, or to the next that comes."""
        for entry in self.peers.lost(identity):
            if self._ledger.get(entry.request_id) is entry:
                self.unassigned[entry.request_id] = entry
        self._submit_unassigned()

    def _submit_unassigned(self) -> None:
        entries, self.unassigned = self.unassigned, {}
        for entry in entries.values():
            self.submit(entry)
        self._on_change()
