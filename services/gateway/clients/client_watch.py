"""Watch of the clients' connections: unread answers, and messages that never end.

libzmq keeps any number of frames until the last of a message has arrived. So each heartbeat checks
how much libzmq has read of each connection since its last message; on ipc, how often bytes were
arriving. Whole messages may wait for the gateway, which libzmq hands over in turns: one of each
client. After as many messages as there are clients, who still has none has not finished any.

libzmq silently ignores a client with the ZeroMQ identity of another client, until that one leaves:
more than a handshake was received, and no message. On ipc an idle client looks the same.
"""

from collections.abc import Iterable, Iterator

from penstock.protocol.config import Config
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.protocol.transport.socket_info import (
    Counters,
    is_all_read,
    num_unread_bytes,
    tcp_counters,
)
from penstock.services.gateway.client import Connection
from penstock.services.gateway.clients.bind_clients import MAX_RECEIVE_QUEUE

HANDSHAKE_BYTES, CURVE_HANDSHAKE_BYTES = 104, 564  # of a REQ socket without an identity, at least
MAX_IDENTITY_BYTES = 255
MIN_MESSAGE_BYTES = 12  # of a request on the wire
MAX_QUIET_HEARTBEATS = 2  # after the first message of a client that libzmq seems to ignore
KERNEL_BYTES = 1 << 23  # more than the system receives ahead for one connection
# bytes of memory for each byte of an unfinished message: 64 for an empty frame, which has 2
EXPANSION = 32
# at which bytes of one message arrive; a whole message takes milliseconds within a machine
MAX_BUSY_HEARTBEATS = 2
IGNORED = (
    "its ZeroMQ identity is that of another client (choose another), or its message has no end"
)
UNFINISHED = "a message was begun that is longer than any request, or all that were begun are"


def update_num_read(connection: Connection) -> None:
    """Query the kernel, which knows of a connection other than TCP only whether all is read."""
    num_given = connection.num_read + connection.num_queued
    if counters := tcp_counters(connection.fd):
        connection.num_read = max(connection.num_read, counters.acked)
    elif is_all_read(connection.fd):
        connection.num_read = num_given
    connection.num_queued = max(0, num_given - connection.num_read)  # not messages alone


def read_counters(fd: int) -> Counters | None:
    """Return the counters of a connection, without bytes that libzmq has not read yet."""
    if counters := tcp_counters(fd):
        return counters._replace(received=max(0, counters.received - num_unread_bytes(fd)))
    return None


def take_progress(connection: Connection) -> int:
    """Return the number of bytes that were read since the last call."""
    before, connection.num_read_before = connection.num_read_before, connection.num_read
    return connection.num_read - before


class Arrivals:
    """Bytes that arrived on one connection, from heartbeat to heartbeat."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_messages_before = self._num_received_before = self._num_busy_heartbeats = 0
        self._num_received_last = self._num_quiet_heartbeats = self._identity_bytes = 0
        self._num_at_turn = 0  # bytes since the last message, when the turns began

    def num_new_messages(self) -> int:
        """Return the number of messages since the last heartbeat."""
        return self._connection.num_messages - self._num_messages_before

    def num_since_message(self, num_received: int) -> int:
        """Return the bytes since the last message, of all received (at most)."""
        self._forget_before(num_received)
        return num_received - self._num_received_before

    def num_unfinished(self, num_bytes: int, waits: bool) -> int:
        """Return the bytes of no whole message, after each client had its turn, or none waits.

        num_bytes: since the last message."""
        before, self._num_at_turn = self._num_at_turn, num_bytes
        return before if waits else num_bytes

    def num_busy_heartbeats(self, is_receiving: bool) -> int:
        """Return at how many heartbeats bytes were arriving since the last whole message."""
        self._forget_before(0)
        self._num_busy_heartbeats += is_receiving
        return self._num_busy_heartbeats

    def _forget_before(self, num_received: int) -> None:
        if self._num_messages_before != self._connection.num_messages:
            self._num_messages_before, self._num_busy_heartbeats = self._connection.num_messages, 0
            self._num_received_before, self._num_at_turn = num_received, 0

    def is_ignored(self, counters: Counters | None, identity_bytes: int, is_curve: bool) -> bool:
        """Return whether libzmq has read more than a handshake, but no message, and then nothing.

        Without counters, a client that has sent nothing looks the same.

        identity_bytes: of the shortest identity that a client has chosen; 0 if none has. It is
        remembered: when that client leaves, libzmq still ignores this one."""
        known = filter(None, (self._identity_bytes, identity_bytes))
        identity_bytes = self._identity_bytes = min(known, default=0)
        num_received = least = 0
        patience = MAX_MISSED_HEARTBEATS
        if counters:
            num_received = counters.received
            least = (CURVE_HANDSHAKE_BYTES if is_curve else HANDSHAKE_BYTES) + MIN_MESSAGE_BYTES
            least += identity_bytes or MAX_IDENTITY_BYTES
            patience = MAX_QUIET_HEARTBEATS if identity_bytes else patience
        is_known = counters or identity_bytes
        if self._connection.num_messages or num_received < least or not is_known:
            return False
        if num_received > self._num_received_last:
            self._num_received_last, self._num_quiet_heartbeats = num_received, 0
        self._num_quiet_heartbeats += 1
        return self._num_quiet_heartbeats > patience


class ClientWatch:
    """The check of all connections, at each heartbeat."""

    def __init__(self, config: Config, max_frame_bytes: int) -> None:
        self._may_be_curve = bool(config.curve_keys) or config.backend != "local"
        self._max_unfinished_bytes = config.max_open_bytes // EXPANSION
        self._max_frame_bytes = max_frame_bytes
        self._arrivals: dict[Connection, Arrivals] = {}
        self._num_turns = 0  # messages until each client has had its turn

    def bad_clients(
        self, connections: Iterable[Connection], waits: bool, identity_bytes: int
    ) -> Iterator[tuple[Connection, str]]:
        """Yield clients that libzmq ignores, and clients whose messages do not end, with reasons.

        waits: a message waits in libzmq's queue. identity_bytes: as in `is_ignored`.
        """
        unfinished: list[tuple[int, Connection]] = []
        num_messages = MAX_RECEIVE_QUEUE + 1 if waits else 1  # whole ones may wait
        limit = self._max_frame_bytes * num_messages + KERNEL_BYTES
        self._arrivals = {one: self._arrivals.get(one) or Arrivals(one) for one in connections}
        self._num_turns -= sum(its.num_new_messages() for its in self._arrivals.values())
        if is_known := not waits or self._num_turns <= 0:
            self._num_turns = len(self._arrivals)
        for one, arrivals in self._arrivals.items():
            counters = read_counters(one.fd)
            shortest = 0 if one.is_inner else identity_bytes
            if arrivals.is_ignored(counters, shortest, self._may_be_curve):
                yield one, IGNORED
            elif counters is None:
                is_receiving = not waits and num_unread_bytes(one.fd) > 0
                if arrivals.num_busy_heartbeats(is_receiving) > MAX_BUSY_HEARTBEATS:
                    yield one, UNFINISHED
            elif (num_bytes := arrivals.num_since_message(counters.received)) > limit:
                yield one, UNFINISHED
            elif is_known:
                unfinished.append((arrivals.num_unfinished(num_bytes, waits), one))
        num_all = sum(num_bytes for num_bytes, _ in unfinished)
        for num_bytes, one in sorted(unfinished, key=lambda pair: -pair[0]):
            if num_all <= self._max_unfinished_bytes:
                break
            num_all -= num_bytes
            yield one, UNFINISHED
