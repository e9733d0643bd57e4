"""Client connections: opening, closing, limits for each host.

A ROUTER learns of a disconnected client only when it sends to it. libzmq's monitor reports it at
once, by file descriptor, and every message carries the descriptor of its connection. An accepted
connection is reported before its first message arrives.
"""

import logging
import resource
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.socket_info import (
    duplicate,
    network_of,
    peer_host,
    peer_process,
    shut_down,
    take_events,
)
from penstock.services.gateway.client import Client, Connection, Share
from penstock.services.gateway.validation import refusal

log = logging.getLogger("gateway")
MAX_EARLIER = 64  # closed connections of one file descriptor whose waiting messages are recognized
# of a gateway with as many descriptors: libzmq keeps some 50 KB for each connection
MAX_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 256  # for the pipeline's own connections and files
TOO_MANY = "too many connections; the limit depends on its limit of open files (ulimit -n)"
TOO_MANY_OF_ONE = "too many connections from this address"
TOO_MANY_SILENT = "too many connections that have not sent a request, or shown a key"


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
        connection = self.by_fd[fd] = Connection(fd, self._share(name), is_inner)
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
        if is_known:  # all messages so far were those of a connection that was closed before
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
        identities = self._identities_closed | {one.identity for one in self.by_fd.values()}
        self._identities_closed = set()
        return min((len(one) for one in identities if is_chosen(one)), default=0)

    def named_client(self, client: Client, name: str) -> Client:
        """Return the client that a request names. Raises RefusedError where it may name none."""
        if not client.connection.is_inner:
            raise refusal("client", f"got {name!r}, expected none: only HTTP servers name clients")
        return client._replace(share=self._share(name), turn=name)

    def set_key(self, connection: Connection, key: str) -> None:
        """Record the CURVE key of a connection's client, before its first request."""
        connection.share = self._share(f"key {key}")

    def _share(self, name: str) -> Share:
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name)
        return share

    def _oldest_silent(self, host: str) -> Connection | None:
        """Return the connection of this machine that has been silent longest."""
        same = (one for one in self.by_fd.values() if one.host == host and not one.is_inner)
        return next((one for one in same if not (one.identity or one.is_refused)), None)

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
        """Count a new connection. Return why one is to be closed; None if all may stay."""
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
