"""Clients that libzmq ignores, whose messages do not end, or that do not read, are found.

libzmq keeps any number of frames until the last of a message has arrived. So each heartbeat checks
how much each connection has received since its last message; on ipc, how often bytes were arriving.

libzmq silently ignores a client with the ZeroMQ identity of another client, until that one leaves:
more than a handshake was received, and no message. On ipc an idle client looks the same.
"""

from penstock.protocol.config import Config
from penstock.protocol.transport.socket_info import num_unread_bytes, tcp_counters
from penstock.services.gateway.client_socket import MAX_RECEIVE_QUEUE, ClientSocket
from penstock.services.gateway.connections import Connection

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

    def __init__(self, clients: ClientSocket, config: Config) -> None:
        self._clients, self._connections = clients, clients.connections
        self._may_be_curve = bool(config.curve_keys) or config.backend != "local"
        self._max_unfinished_bytes = config.max_open_bytes // EXPANSION

    def on_heartbeat(self) -> None:
        """Disconnect clients that libzmq ignores, and clients whose messages do not end."""
        unfinished: list[tuple[int, Connection]] = []
        waits = self._clients.channel.has_message
        num_messages = (
            MAX_RECEIVE_QUEUE + 1 if waits else 1
        )  # whole ones may wait in libzmq's queue
        limit = self._clients.max_frame_bytes * num_messages + KERNEL_BYTES
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

    def retry_full(self) -> list[Connection]:
        """Try full queues again. Return connections that have left too much unread.

        Our HTTP servers are not among them: they drop their own clients.
        """
        full = [one for one in self._connections if one.is_full]
        for connection in full:
            connection.traffic.update_num_read()
            self._clients.flush(connection)
        limit = self._clients.max_unread_bytes
        return [
            one
            for one in full
            if not one.is_inner
            and one.traffic.take_progress()
            < limit
            < self.num_unread_bytes(one) - one.traffic.largest
        ]

    def num_unread_bytes(self, connection: Connection) -> int:
        """Return the bytes that wait for one connection, here and in libzmq's queue."""
        entries = (self._clients.ledger.find(request_id) for request_id in connection.unsent)
        num_bytes = sum(len(frame) for frames in connection.replies for frame in frames)
        num_bytes += sum(entry.num_unread_bytes for entry in entries if entry)
        return connection.traffic.num_queued + num_bytes
