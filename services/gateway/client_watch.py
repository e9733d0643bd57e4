"""Clients that libzmq ignores, and clients whose messages do not end, are disconnected.

libzmq keeps any number of frames until the last of a message has arrived. So each heartbeat checks
how much each connection has received since its last message; on ipc, how often bytes were arriving.

libzmq silently ignores a client with the ZeroMQ identity of another client, until that one leaves:
more than a handshake was received, and no message. On ipc an idle client looks the same.
"""

from typing import Any

from penstock.protocol.config import Config
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.socket_info import num_unread_bytes, tcp_counters
from penstock.services.gateway.connections import Connection, Connections

MAX_RECEIVE_QUEUE = 8
"""messages of one client that libzmq receives ahead; then the client has to wait"""
KERNEL_BYTES = 1 << 23
"""more than the system receives ahead for one connection"""
EXPANSION = 32
"""bytes of memory for each byte of an unfinished message: 64 for an empty frame, which has 2"""
MAX_BUSY_HEARTBEATS = 2
"""at which bytes of one message arrive; a whole message takes milliseconds within a machine"""
IGNORED = (
    "its ZeroMQ identity is that of another client (choose another), or its message has no end"
)
UNFINISHED = "a message was begun that is longer than any request, or all that were begun are"


class ClientWatch:
    """Heartbeats of the clients' socket."""

    def __init__(
        self,
        config: Config,
        channel: Channel[Any],
        connections: Connections,
        max_frame_bytes: int,
    ) -> None:
        self._channel, self._connections = channel, connections
        self._max_frame_bytes = max_frame_bytes
        self._may_be_curve = bool(config.curve_keys) or config.backend != "local"
        self._max_unfinished_bytes = config.max_open_bytes // EXPANSION

    def on_heartbeat(self) -> None:
        """Disconnect clients that libzmq ignores, and clients whose messages do not end."""
        unfinished: list[tuple[int, Connection]] = []
        # Whole messages may wait in libzmq's queue.
        waits = self._channel.has_message
        limit = self._max_frame_bytes * (MAX_RECEIVE_QUEUE + 1 if waits else 1) + KERNEL_BYTES
        shortest = self._connections.take_shortest_identity()
        for connection in self._connections:
            counters = tcp_counters(connection.fd)
            identity_bytes = 0 if connection.is_inner else shortest
            if connection.traffic.is_ignored(counters, identity_bytes, self._may_be_curve):
                self._connections.cut_off(connection, IGNORED)
            elif counters is None:
                num_busy = connection.traffic.num_busy_heartbeats(
                    not waits and num_unread_bytes(connection.fd) > 0
                )
                if num_busy > MAX_BUSY_HEARTBEATS:
                    self._connections.cut_off(connection, UNFINISHED)
            elif num_bytes := connection.traffic.num_unfinished(counters.received):
                unfinished.append((num_bytes, connection))
        num_all = sum(num_bytes for num_bytes, _ in unfinished)
        for num_bytes, connection in sorted(unfinished, key=lambda one: -one[0]):
            if num_bytes <= limit and num_all <= self._max_unfinished_bytes:
                break
            num_all -= num_bytes
            self._connections.cut_off(connection, UNFINISHED)
