"""Answers on their way to clients, none faster than its client reads."""

from time import monotonic
from typing import Any

import zmq

from penstock.protocol.config import Config
from penstock.protocol.messages.client import Reply
from penstock.protocol.transport.channel import Channel
from penstock.services.gateway.connections import Client, Connection, Connections
from penstock.services.gateway.entry import Entry
from penstock.services.gateway.ledger import Ledger

FRAME_BYTES, CURVE_FRAME_BYTES = 2, 35
"""of a frame on the wire beside its content, at least"""
RETRY_INTERVAL = 0.01
"""seconds in which a full queue is not tried again: a try costs the encoding of a reply"""


class Outbox:
    """Sends what the ledger has and the clients have not.

    When the queue of one connection is full (libzmq's, or because `max_unread_bytes` in it are not
    read), its news stay in the ledger and go out together, as
    one delta a request, when there is room: at the next news for that connection, or at the next
    heartbeat.
    """

    def __init__(
        self, channel: Channel[Any], ledger: Ledger, connections: Connections, config: Config
    ) -> None:
        self._max_unread_bytes = config.max_unread_bytes
        self._frame_overhead = CURVE_FRAME_BYTES if config.keys else FRAME_BYTES
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

    def on_heartbeat(self) -> list[Connection]:
        """Tries full queues again. Returns the connections that are to be cut off.

        They have left more unread than the limit, the largest message not counted, and have read
        less than the limit since the last heartbeat.
        """
        full = self._connections.full()
        for connection in full:
            connection.look()
            self._flush(connection)
        limit = self._max_unread_bytes
        return [
            one
            for one in full
            if one.take_progress() < limit < self.num_unread_bytes(one) - one.largest
        ]

    def num_unread_bytes(self, connection: Connection) -> int:
        """What waits for one connection, here and in libzmq's queue."""
        entries = (self._ledger.find(request_id) for request_id in connection.unsent)
        num_bytes = sum(len(frame) for frames in connection.replies for frame in frames)
        num_bytes += sum(entry.num_unread_bytes for entry in entries if entry)
        return connection.num_queued + num_bytes

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
            if self._try_send(connection, connection.replies[0]) == zmq.EAGAIN:
                connection.retry_at = monotonic() + RETRY_INTERVAL
                return
            connection.replies.popleft()

    def _send(self, entry: Entry) -> bool:
        """All that is new of a request; False if the queue is full."""
        client, error = entry.client, 0
        connection = client.connection
        if delta := entry.untold():
            frames = [*client.envelope, client.codec.encode(delta)]
            error = self._try_send(connection, frames)
            if not error:
                entry.told()
        if entry.answer and not error:
            frames = [*client.envelope, client.codec.encode(entry.answer)]
            error = self._try_send(connection, frames)
            if not error:
                self.close(entry)
        if not error:
            return True
        if error == zmq.EHOSTUNREACH:
            entry.client = self._connections.lose(entry.request_id, client)
            return True
        connection.retry_at = monotonic() + RETRY_INTERVAL
        return False

    def _try_send(self, connection: Connection, frames: list[bytes]) -> int:
        """As `Channel.try_send`; EAGAIN, too, where too much of what was sent is not read."""
        if connection.num_queued > self._max_unread_bytes:
            connection.look()
            if connection.num_queued > self._max_unread_bytes:
                return zmq.EAGAIN
        error = self._channel.try_send(frames)
        if not error:
            connection.gave(len(frames[-1]) + self._frame_overhead * (len(frames) - 1))
        return error

    def _is_full(self, client: Client, frames: list[bytes]) -> bool:
        is_full = self._try_send(client.connection, frames) == zmq.EAGAIN
        if is_full:
            client.connection.retry_at = monotonic() + RETRY_INTERVAL
        return is_full
