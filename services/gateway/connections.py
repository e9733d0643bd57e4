"""Client connections: endpoints, opening, closing, limits, and the watch for bad clients.

A ROUTER detects a disconnected client only when the ROUTER sends to that client. libzmq's monitor
reports the disconnect at once, by file descriptor. Every message carries the descriptor of its
connection. The monitor reports an accepted connection before its first message arrives.
"""

import logging
import resource
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import zmq

from penstock.protocol.config import Config
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.protocol.transport.context import ZAP_DOMAIN, secure_server, stays_on_host
from penstock.protocol.transport.process import Process
from penstock.protocol.transport.socket_info import (
    Counters,
    duplicate,
    is_all_read,
    network_of,
    num_unread_bytes,
    peer_host,
    peer_process,
    shut_down,
    take_events,
    tcp_counters,
)
from penstock.services.gateway.request import Connection, Share

log = logging.getLogger("gateway")
MAX_EARLIER = 64  # closed connections remembered per file descriptor, to detect their late messages
# Limit if enough file descriptors are available: libzmq needs about 50 KB for each connection.
MAX_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 256  # descriptors for the pipeline's own connections and files
TOO_MANY = "too many connections; the limit depends on its limit of open files (ulimit -n)"
TOO_MANY_OF_ONE = "too many connections from this address"
TOO_MANY_SILENT = "too many connections that have not sent a request, or shown a key"
# messages of one client in libzmq's receive queue; then the client has to wait
MAX_RECEIVE_QUEUE = 8
# messages in libzmq's send queue for one client; further output waits in the ledger
MAX_SEND_QUEUE = 4096
OPTIONS: dict[int, int] = {
    zmq.HANDSHAKE_IVL: 10_000,  # time limit of a handshake in milliseconds
    zmq.RCVHWM: MAX_RECEIVE_QUEUE,
    # The connection of an unreachable machine ends after 25 s. Until then its client can't
    # reconnect with the same ZeroMQ identity.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
HANDSHAKE_BYTES, CURVE_HANDSHAKE_BYTES = 104, 564  # minimum: a REQ socket without an identity
MAX_IDENTITY_BYTES = 255
MIN_MESSAGE_BYTES = 12  # minimum size of a request on the wire
MAX_QUIET_HEARTBEATS = 2  # heartbeats without new bytes, of a client that libzmq seems to ignore
KERNEL_BYTES = 1 << 23  # upper bound of the kernel's receive buffer of one connection
# bytes of memory per byte of an unfinished message: an empty frame has 2 bytes and takes 64
EXPANSION = 32
# Heartbeats at which one message may still be arriving: within a machine a whole message takes
# milliseconds.
MAX_BUSY_HEARTBEATS = 2
IGNORED = (
    "its ZeroMQ identity is that of another client (choose another), or its message has no end"
)
UNFINISHED = "its unfinished message, or all unfinished messages together, are too long"


def bind_clients(process: Process, monitor: str, max_bytes: int) -> tuple[Channel[Any], bytes]:
    """Return the clients' bound socket, and the bound endpoint of the pipeline's processes.

    That endpoint needs no keys. `monitor` receives events of connections. Raises as `bind`.
    """
    context, config, inner = process.context, process.config, process.endpoints.inner_clients
    if config.curve_keys:
        context.admit(ZAP_DOMAIN, Path(config.curve_keys))
    elif not stays_on_host(config.endpoint):
        log.warning(
            "--insecure: anybody who reaches %s may send requests, and anybody who sees the "
            "network's traffic reads prompts and answers",
            config.endpoint,
        )
    # The pipeline's own processes use a separate endpoint. Bind the endpoint without keys first.
    is_inner_first = bool(config.curve_keys) or not context.node_id
    endpoint = inner if is_inner_first else config.endpoint
    options = OPTIONS | {zmq.SNDHWM: MAX_SEND_QUEUE}
    channel: Channel[Any] = context.bind(zmq.ROUTER, endpoint, None, max_bytes, options, monitor)
    if not is_inner_first:
        context.bind_also(channel, inner)
        return channel, channel.last_endpoint
    bound = channel.last_endpoint
    if config.curve_keys:
        secure_server(channel.socket, Path(config.curve_keys))
    channel.socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    channel.socket.setsockopt(zmq.IPV6, "[" in config.endpoint)
    context.bind_also(channel, config.endpoint)
    return channel, bound


class Connections:
    """All connections by file descriptor.

    A descriptor names a connection from its accept event to its close event; then the kernel reuses
    the number. So callers call `handle_events` before they look up a connection. Messages of a
    closed connection may still arrive with its descriptor; `sender` recognizes their identities.
    """

    def __init__(self, monitor: Channel[Any]) -> None:
        """Make an empty collection. `monitor` receives libzmq's events of the clients' socket."""
        self.monitor = monitor
        # bound endpoint of the pipeline's own processes
        self.inner = b""
        self.by_fd: dict[int, Connection] = {}
        self._nobody = Connection(is_closed=True)
        self._shares: WeakValueDictionary[str, Share] = WeakValueDictionary()  # by `Share.name`
        self._numbers = count(1)
        self._limits = ConnectionLimits()
        self._num_cut_off: Counter[str] = Counter()  # disconnected clients by reason
        # connections that the next `handle_events` disconnects, with reasons
        self.refused: list[tuple[Connection, str]] = []
        # identities of connections that were closed since the last heartbeat
        self._identities_closed: set[bytes] = set()
        # identities of the last MAX_EARLIER closed connections, by file descriptor
        self._earlier: dict[int, deque[bytes]] = {}

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self.by_fd.values()))

    @property
    def num_cut_off(self) -> int:
        return self._num_cut_off.total()

    def handle_events(self) -> None:
        """Handle all events so far. Disconnect refused connections."""
        if self.monitor.has_message:
            self._take_events()
        while self.refused:
            self.cut_off(*self.refused.pop())

    def open(self, fd: int, host: str = "", is_inner: bool = False) -> Connection:
        number = next(self._numbers)
        process = not (host or is_inner) and peer_process(fd)
        name = network_of(host) or (f"process {process}" if process else f"connection {number}")
        connection = self.by_fd[fd] = Connection(fd, self.share(name), is_inner)
        connection.number = number
        connection.host = host
        if reason := self._limits.opened(host):
            self._refuse(self._oldest_silent(host) or connection, reason)
        return connection

    def close(self, fd: int) -> None:
        """Remove a connection. Its client may resubmit requests on another connection."""
        if connection := self.by_fd.pop(fd, None):
            self._abandon(connection)
            self._identities_closed.add(connection.identity)
            self._remember(fd, connection.identity)
            if not connection.is_refused:
                self._limits.closed(connection.host, is_silent=not connection.identity)

    def cut_off(self, connection: Connection, reason: str) -> None:
        """Disconnect a client. Count the reason, and log each reason once."""
        if connection.is_closed:
            return
        connection.is_cut_off = True
        self._abandon(connection)
        self._num_cut_off[reason] += 1
        if self._num_cut_off[reason] == 1:
            who = connection.host or "this machine"
            log.warning("disconnected a client at %s (more are only counted): %s", who, reason)
        with duplicate(connection.fd) as end:  # libzmq may close the descriptor at any time
            self._take_events()
            if self.by_fd.get(connection.fd) is connection:
                shut_down(end)

    def sender(self, fd: int, identity: bytes) -> Connection:
        """Return the connection of a message; a closed `Connection` if it has been closed.

        A ROUTER returns the first message of an earlier connection before the first message of a
        later connection. So a new identity belongs to the newest connection with this descriptor.
        """
        connection = self.by_fd.get(fd)
        if connection is None:
            self._remember(fd, identity)
            return self._nobody
        if connection.identity == identity or connection.is_closed:
            return connection
        is_known = bool(connection.identity)
        if identity in self._earlier.get(fd, ()) and (is_known or not is_chosen(identity)):
            return self._nobody
        if is_known:  # messages so far came from an earlier, closed connection
            self.close(fd)
            connection = self.open(fd, connection.host, connection.is_inner)
        self._limits.spoke(connection.host)
        connection.identity = identity
        return connection

    def _remember(self, fd: int, identity: bytes) -> None:
        earlier = self._earlier.setdefault(fd, deque(maxlen=MAX_EARLIER))
        if identity and identity not in earlier:
            earlier.append(identity)

    def take_shortest_identity(self) -> int:
        """Return the length of the shortest chosen identity since the last call; 0 for none."""
        identities = self._identities_closed | {each.identity for each in self.by_fd.values()}
        self._identities_closed = set()
        return min(map(len, filter(is_chosen, identities)), default=0)

    def share(self, name: str) -> Share:
        """Return the share of a client. The share is dropped with the client's last request."""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name)
        return share

    def _oldest_silent(self, host: str) -> Connection | None:
        """Return the host's oldest connection that has not sent a request, if any."""
        same = (each for each in self.by_fd.values() if each.host == host and not each.is_inner)
        return next((each for each in same if not (each.identity or each.is_refused)), None)

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Count a connection as closed. `handle_events` disconnects it."""
        connection.is_refused = True
        self._limits.closed(connection.host, is_silent=not connection.identity)
        self.refused.append((connection, reason))

    def _take_events(self) -> None:
        for fd, endpoint in take_events(self.monitor):
            if endpoint is None:
                self.close(fd)
            else:
                self.open(fd, peer_host(fd), endpoint == self.inner)

    def _abandon(self, connection: Connection) -> None:
        connection.is_closed = True
        connection.unsent.clear()
        connection.replies.clear()


def is_chosen(identity: bytes) -> bool:
    """Return whether a client chose this identity. libzmq's identities begin with a zero byte."""
    return not identity.startswith(b"\0") and identity != b""


class ConnectionLimits:
    """Limits on connections, by host.

    A host may have half of `max_connections`. A silent connection has not sent a request yet. An
    eighth of `max_connections` may be silent connections of a host, and half in total.
    """

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._silent: Counter[str] = Counter()

    def opened(self, host: str) -> str | None:
        """Count a new connection. Return the reason if a connection must be closed."""
        self._hosts[host] += 1
        self._silent[host] += 1
        limit = max_connections()
        if self._hosts.total() > limit:
            return TOO_MANY
        if self._hosts[host] > limit // 2:
            return TOO_MANY_OF_ONE
        if self._silent[host] > limit // 8 or self._silent.total() > limit // 2:
            return TOO_MANY_SILENT
        return None

    def spoke(self, host: str) -> None:
        self._silent -= Counter((host,))

    def closed(self, host: str, is_silent: bool) -> None:
        self._hosts -= Counter((host,))
        if is_silent:
            self._silent -= Counter((host,))


def max_connections() -> int:
    """Return the current limit. The supervisor may raise the limit of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(max(soft - RESERVED_DESCRIPTORS, soft // 2), MAX_CONNECTIONS)


def update_num_read(connection: Connection) -> None:
    """Update read and queued bytes. Except for TCP, the kernel only knows if all are read."""
    num_given = connection.num_read + connection.num_queued
    if counters := tcp_counters(connection.fd):
        connection.num_read = max(connection.num_read, counters.acked)
    elif is_all_read(connection.fd):
        connection.num_read = num_given
    connection.num_queued = max(0, num_given - connection.num_read)  # handshakes count as read


def _read_counters(fd: int) -> Counters | None:
    """Return the TCP counters of a connection, excluding bytes that libzmq has not read yet."""
    if counters := tcp_counters(fd):
        return counters._replace(received=max(0, counters.received - num_unread_bytes(fd)))
    return None


def take_progress(connection: Connection) -> int:
    """Return the number of bytes that the client has read since the last call."""
    before, connection.num_read_before = connection.num_read_before, connection.num_read
    return connection.num_read - before


class Arrivals:
    """The byte counts of one connection at each heartbeat, for `ClientWatch`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_messages_before = self._num_received_before = self._num_busy_heartbeats = 0
        self._num_received_last = self._num_quiet_heartbeats = self._identity_bytes = 0
        self._num_at_turn = 0  # bytes since the last message, at the start of the round of turns

    def num_new_messages(self) -> int:
        """Return the number of messages since the last heartbeat."""
        return self._connection.num_messages - self._num_messages_before

    def num_since_message(self, num_received: int) -> int:
        """Return an upper bound of the bytes since the last message, of all `num_received`."""
        self._forget_before(num_received)
        return num_received - self._num_received_before

    def num_unfinished(self, num_bytes: int, waits: bool) -> int:
        """Return the bytes of an unfinished message, when each client has had its turn.

        num_bytes: bytes since the last message. waits: whether a message waits in libzmq's queue.
        """
        before, self._num_at_turn = self._num_at_turn, num_bytes
        return before if waits else num_bytes

    def num_busy_heartbeats(self, is_receiving: bool) -> int:
        """Return the number of heartbeats with arriving bytes since the last whole message."""
        self._forget_before(0)
        self._num_busy_heartbeats += is_receiving
        return self._num_busy_heartbeats

    def _forget_before(self, num_received: int) -> None:
        if self._num_messages_before != self._connection.num_messages:
            self._num_messages_before, self._num_busy_heartbeats = self._connection.num_messages, 0
            self._num_received_before, self._num_at_turn = num_received, 0

    def is_ignored(self, counters: Counters | None, identity_bytes: int, is_curve: bool) -> bool:
        """Return whether libzmq seems to ignore this connection.

        libzmq has then read more than a handshake, delivered no message, and read no more bytes.
        Without counters, a client that has sent nothing looks the same.

        identity_bytes: length of the shortest identity that a client has chosen, or 0. The length
        is remembered: libzmq ignores this connection even after the other client has left.
        """
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
    """The check of all connections, at each heartbeat, for endless messages and ignored clients.

    libzmq buffers any number of frames until a message is complete. So each heartbeat checks how
    many bytes libzmq has read from each connection since its last message. On ipc, which has no
    such counters, the check counts the heartbeats at which bytes arrive. Whole messages may wait
    in libzmq's queues; libzmq hands them over in turns, a message of each client. After as many
    messages as there are clients, a client without a message has no whole message in the queue.

    libzmq silently ignores a client with the ZeroMQ identity of another connected client. The
    connection of such a client receives more than a handshake, but delivers no message. On ipc an
    idle client looks the same.
    """

    def __init__(self, config: Config, max_frame_bytes: int) -> None:
        self._may_be_curve = bool(config.curve_keys) or config.backend != "local"
        self._max_unfinished_bytes = config.max_open_bytes // EXPANSION
        self._max_frame_bytes = max_frame_bytes
        self._arrivals: dict[Connection, Arrivals] = {}
        self._num_turns = 0  # messages left until each client has had its turn

    def bad_clients(
        self, connections: Iterable[Connection], waits: bool, identity_bytes: int
    ) -> Iterator[tuple[Connection, str]]:
        """Yield ignored clients and clients with endless messages, each with the reason.

        waits: whether a message waits in libzmq's queue. identity_bytes: as in `is_ignored`.
        """
        unfinished: list[tuple[int, Connection]] = []
        num_messages = MAX_RECEIVE_QUEUE + 1 if waits else 1  # whole messages may wait
        limit = self._max_frame_bytes * num_messages + KERNEL_BYTES
        self._arrivals = {each: self._arrivals.get(each) or Arrivals(each) for each in connections}
        self._num_turns -= sum(its.num_new_messages() for its in self._arrivals.values())
        if is_known := not waits or self._num_turns <= 0:
            self._num_turns = len(self._arrivals)
        for connection, arrivals in self._arrivals.items():
            counters = _read_counters(connection.fd)
            shortest = 0 if connection.is_inner else identity_bytes
            if arrivals.is_ignored(counters, shortest, self._may_be_curve):
                yield connection, IGNORED
            elif counters is None:
                is_receiving = not waits and num_unread_bytes(connection.fd) > 0
                if arrivals.num_busy_heartbeats(is_receiving) > MAX_BUSY_HEARTBEATS:
                    yield connection, UNFINISHED
            elif (num_bytes := arrivals.num_since_message(counters.received)) > limit:
                yield connection, UNFINISHED
            elif is_known:
                unfinished.append((arrivals.num_unfinished(num_bytes, waits), connection))
        num_all = sum(num_bytes for num_bytes, _ in unfinished)
        for num_bytes, connection in sorted(unfinished, key=lambda pair: -pair[0]):
            if num_all <= self._max_unfinished_bytes:
                break
            num_all -= num_bytes
            yield connection, UNFINISHED
