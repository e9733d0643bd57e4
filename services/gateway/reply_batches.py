"""Replies to several requests of one HTTP server, which leave in one message."""

from collections.abc import Iterator

from penstock.protocol.messages.client import ReplyBatch
from penstock.protocol.messages.codec import MSGPACK
from penstock.services.gateway.connections import Connection
from penstock.services.gateway.entry import Entry, Output


class ReplyBatches:
    """Unsent replies by the connection of an HTTP server."""

    def __init__(self) -> None:
        self.unsent: dict[Connection, list[tuple[Entry, Output]]] = {}

    def add(self, entry: Entry) -> bool:
        """Add new output of a request; False if it can't be in a batch."""
        connection, number = entry.client.connection, entry.client.envelope[1:]
        is_batched = len(number) == 1 and number != (b"",)
        if not is_batched or connection.is_full or connection.is_closed:
            return False
        if replies := entry.unsent_replies():
            self.unsent.setdefault(connection, []).extend((entry, one) for one in replies)
        return True

    def take(self) -> Iterator[tuple[Connection, list[bytes], list[tuple[Entry, Output]]]]:
        """Yield each connection, the frames of its message, and what they deliver."""
        batches, self.unsent = self.unsent, {}
        for connection, batch in batches.items():
            numbers = [entry.client.envelope[1] for entry, _ in batch]
            frame = MSGPACK.encode(ReplyBatch(numbers, [reply for _, reply in batch]))
            yield connection, [connection.identity, b"", frame], batch
