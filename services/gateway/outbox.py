"""Answers on their way to clients, none faster than its client reads."""

from time import monotonic
from typing import Any

import zmq

from penstock.protocol.client import Reply
from penstock.protocol.sockets import Channel
from penstock.services.gateway.connections import Client, Connection, Connections
from penstock.services.gateway.ledger import Entry, Ledger

RETRY_INTERVAL = 0.01
"""seconds in which a full queue is not tried again: a try costs the encoding of a reply"""


class Outbox:
    """Sends what the ledger has and the clients have not.

    When the queue of one connection is full, its news stay in the ledger and go out together, as
    one delta a request, when there is room: at the next news for that connection, or at the next
    heartbeat.
    """

    def __init__(self, channel: Channel[Any], ledger: Ledger, connections: Connections) -> None:
        self._channel = channel
        self._ledger = ledger
        self._connections = connections

    def reply(self, client: Client, reply: Reply) -> None:
        """Answers what is in no ledger."""
        self.send(client, client.codec.encode(reply))

    def send(self, client: Client, reply: bytes) -> None:
        """As `reply`, with an encoded one; a client that has disconnected needs none."""
        frames = [*client.envelope, reply]
        connection = client.connection
        if not connection.is_gone and (connection.is_full or self._is_full(client, frames)):
            connection.replies.append(frames)

    def deliver(self, entry: Entry) -> None:
        """Sends what is new of a request; one that is answered leaves the ledger with that."""
        connection = entry.client.connection
        if connection.is_gone:
            return
        if connection.is_full:
            connection.unsent[entry.request_id] = None
            if monotonic() >= connection.retry_at:
                self._flush(connection)
        elif not self._send(entry):
            connection.unsent[entry.request_id] = None

    def on_heartbeat(self, max_unread_bytes: int) -> list[Connection]:
        """Tries full queues again; the connections for which more than so many bytes wait."""
        full = self._connections.full()
        for connection in full:
            self._flush(connection)
        return [one for one in full if self.num_unread_bytes(one) > max_unread_bytes]

    def num_unread_bytes(self, connection: Connection) -> int:
        """What waits for one connection."""
        entries = (self._ledger.find(request_id) for request_id in connection.unsent)
        num_bytes = sum(len(frame) for frames in connection.replies for frame in frames)
        return num_bytes + sum(entry.num_unread_bytes for entry in entries if entry)

    def close(self, entry: Entry) -> None:
        """Forgets a request."""
        self._connections.remove(entry.request_id, entry.client)
        self._ledger.close(entry)

    def _flush(self, connection: Connection) -> None:
        """Sends what waits, until the queue is full again."""
        for request_id in list(connection.unsent):
            entry = self._ledger.find(request_id)
            if entry and not self._send(entry):
                return
            connection.unsent.pop(request_id, None)
        while connection.replies:
            if self._channel.try_send(connection.replies[0]) == zmq.EAGAIN:
                connection.retry_at = monotonic() + RETRY_INTERVAL
                return
            connection.replies.popleft()

    def _send(self, entry: Entry) -> bool:
        """All that is new of a request; False if the queue is full."""
        client, error = entry.client, 0
        if delta := entry.untold():
            error = self._channel.try_send([*client.envelope, client.codec.encode(delta)])
            if not error:
                entry.told()
        if entry.answer and not error:
            error = self._channel.try_send([*client.envelope, client.codec.encode(entry.answer)])
            if not error:
                self.close(entry)
        if not error:
            return True
        if error == zmq.EHOSTUNREACH:
            entry.client = self._connections.lose(entry.request_id, client)
            return True
        client.connection.retry_at = monotonic() + RETRY_INTERVAL
        return False

    def _is_full(self, client: Client, frames: list[bytes]) -> bool:
        is_full = self._channel.try_send(frames) == zmq.EAGAIN
        if is_full:
            client.connection.retry_at = monotonic() + RETRY_INTERVAL
        return is_full
