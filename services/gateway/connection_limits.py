"""The number of clients that may be connected: each takes a descriptor and memory, key or not."""

import resource
from collections import Counter

from penstock.services.gateway.connections import Connection

MAX_CONNECTIONS = 4096
"""of a gateway with as many descriptors: libzmq keeps some 50 KB for each connection"""
RESERVE = 256
"""descriptors kept for the pipeline's own connections and files"""
TOO_MANY = "too many connections; the limit depends on its limit of open files (ulimit -n)"
TOO_MANY_OF_ONE = "too many connections from this address"
TOO_MANY_SILENT = "too many connections that have not sent a request, or shown a key"


class ConnectionLimits:
    """Counts connections. Beyond a limit the newest is refused: the others stay as they are.

    One machine may have half of all connections. An eighth of all, of one machine, and half, of all
    machines, may be silent: they have not sent a request yet.
    """

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._silent: Counter[str] = Counter()

    def add(self, connection: Connection) -> str | None:
        """A client has connected. Returns why it is to be disconnected; None if it may stay."""
        host = connection.host
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

    def spoke(self, connection: Connection) -> None:
        """The first message of a client has come."""
        _decrement(self._silent, connection.host)

    def remove(self, connection: Connection) -> None:
        """A connection is closed."""
        _decrement(self._hosts, connection.host)
        if not connection.num_messages:
            _decrement(self._silent, connection.host)


def max_connections() -> int:
    """The limit now: the supervisor raises that of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(max(soft - RESERVE, soft // 2), MAX_CONNECTIONS)


def _decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
