"""Client connections: endpoints, opening, closing, limits, and the watch for bad clients.

A ROUTER learns of a disconnected client only when it sends to it. libzmq's monitor reports it at
once, by file descriptor, and every message carries the descriptor of its connection. An accepted
connection is reported before its first message arrives.
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
MAX_EARLIER = 64  # closed connections of one file descriptor whose waiting messages are recognized
# of a gateway with as many descriptors: libzmq keeps some 50 KB for each connection
MAX_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 256  # for the pipeline's own connections and files
TOO_MANY = "too many connections; the limit depends on its limit of open files (ulimit -n)"
TOO_MANY_OF_ONE = "too many connections from this address"
TOO_MANY_SILENT = "too many connections that have not sent a request, or shown a key"
# messages of one client that libzmq receives ahead; then the client has to wait
MAX_RECEIVE_QUEUE = 8
# messages in libzmq's queue for one client; further output waits in the ledger
MAX_SEND_QUEUE = 4096
OPTIONS: dict[int, int] = {
    zmq.HANDSHAKE_IVL: 10_000,  # milliseconds in which a client shows its key
    zmq.RCVHWM: MAX_RECEIVE_QUEUE,
    # The connection of a machine that has vanished ends after 25 s: until then its client can't
    # reconnect with the same ZeroMQ identity.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
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
UNFINISHED = "its unfinished message, or all unfinished messages together, are too long"


def bind_clients(process: Process, monitor: str, max_bytes: int) -> tuple[Channel[Any], bytes]:
    """Return the clients' socket, and the endpoint, as bound, of the pipeline's own processes.

    The latter endpoint asks for no keys. monitor: receives events of connections. Raises as `bind`.
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
    # Our own processes are clients at an endpoint of their own. The one without keys is first.
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

    A descriptor names a connection from its accept event to its close event; then the system reuses
    the number. So `handle_events` is called before a connection is looked up. Messages of a closed
    connection may still arrive with its descriptor: identities distinguish them (`sender`).
    """

    def __init__(self, monitor: Channel[Any]) -> None:
        """monitor: receives libzmq's events of the clients' socket."""
        self.monitor = monitor
        # endpoint, as it is bound, at which the pipeline's own processes are clients
        self.inner = b""
        self.by_fd: dict[int, Connection] = {}
        self._nobody = Connection(is_closed=True)
        self._shares: WeakValueDictionary[str, Share] = WeakValueDictionary()  # by name
        self._numbers = count(1)
        self._limits = ConnectionLimits()
        self._num_cut_off: Counter[str] = Counter()  # clients, by the reason
        # connections that the next call of `handle_events` disconnects, with the reason
        self.refused: list[tuple[Connection, str]] = []
        # of connections that were closed since the last heartbeat
        self._identities_closed: set[bytes] = set()
        # identities of closed connections by file descriptor, the last MAX_EARLIER of each
        self._earlier: dict[int, deque[bytes]] = {}

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self.by_fd.values()))

    @property
    def num_cut_off(self) -> int:
        return self._num_cut_off.total()

    def handle_events(self) -> None:
        """Handle every event up to now, and disconnect clients beyond a limit."""
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
        """Remove a connection; its requests may be sent again on another one."""
        if connection := self.by_fd.pop(fd, None):
            self._abandon(connection)
            self._identities_closed.add(connection.identity)
            self._remember(fd, connection.identity)
            if not connection.is_refused:
                self._limits.closed(connection.host, is_silent=not connection.identity)

    def cut_off(self, connection: Connection, reason: str) -> None:
        """Disconnect a client. Each reason is logged once, and counted."""
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
        """Return the connection of a message; a closed one if it is closed by now.

        A ROUTER returns the first message of an earlier connection before that of a later one. So
        a new identity belongs to the newest connection with this descriptor.
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
        if is_known:  # all messages so far were of a connection that was closed before
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
        """Return the length of the shortest identity chosen since the last call; 0 if none is."""
        identities = self._identities_closed | {each.identity for each in self.by_fd.values()}
        self._identities_closed = set()
        return min(map(len, filter(is_chosen, identities)), default=0)

    def share(self, name: str) -> Share:
        """Return the share of a client, which is forgotten with its last request."""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name)
        return share

    def _oldest_silent(self, host: str) -> Connection | None:
        """Return the connection of this machine that has been silent longest."""
        same = (each for each in self.by_fd.values() if each.host == host and not each.is_inner)
        return next((each for each in same if not (each.identity or each.is_refused)), None)

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Count a connection as closed, and let `handle_events` disconnect it."""
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
    """Return whether the client has chosen its ZeroMQ identity: libzmq's begin with a zero."""
    return not identity.startswith(b"\0") and identity != b""


class ConnectionLimits:
    """Numbers of connections by host.

    One machine may have half of all connections. An eighth of all, of one machine, and half, of all
    machines, may be silent: they have not sent a request yet.
    """

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._silent: Counter[str] = Counter()

    def opened(self, host: str) -> str | None:
        """Count a new connection. Return why a connection is to be closed; None if all may stay."""
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
    """Return the limit now: the supervisor raises that of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(max(soft - RESERVED_DESCRIPTORS, soft // 2), MAX_CONNECTIONS)


def update_num_read(connection: Connection) -> None:
    """Query the kernel, which knows of a connection other than TCP only whether all is read."""
    num_given = connection.num_read + connection.num_queued
    if counters := tcp_counters(connection.fd):
        connection.num_read = max(connection.num_read, counters.acked)
    elif is_all_read(connection.fd):
        connection.num_read = num_given
    connection.num_queued = max(0, num_given - connection.num_read)  # not messages alone


def _read_counters(fd: int) -> Counters | None:
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
        """Return the bytes of no whole message, once each client has had its turn.

        num_bytes: since the last message. waits: a message waits in libzmq's queue.
        """
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
        remembered: when that client leaves, libzmq still ignores this connection.
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
    """The check of all connections, at each heartbeat, for messages that never end.

    libzmq keeps any number of frames until the last of a message has arrived. So each heartbeat
    checks how much libzmq has read of each connection since its last message; on ipc, how often
    bytes were arriving. Whole messages may wait for the gateway, which libzmq hands over in turns:
    one of each client. After as many messages as there are clients, a client without any has not
    finished any.

    libzmq silently ignores a client with the ZeroMQ identity of another client, until the other
    client leaves: more than a handshake was received, and no message. On ipc an idle client looks
    the same.
    """

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
