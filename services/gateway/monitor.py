"""libzmq's monitor of the clients' socket, which reports connections that come and go.

A ROUTER learns of a client that has disconnected only when it sends to it. The monitor reports it
at once, by file descriptor, and every message carries the descriptor of its connection. An accepted
connection is reported before its first message comes.
"""

import logging
import os
from collections import Counter

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.protocol.transport.context import Context
from penstock.services.gateway.connection_limits import ConnectionLimits
from penstock.services.gateway.connections import Connection, Connections
from penstock.services.gateway.wire import peer_host, shut_down

log = logging.getLogger("gateway")


class Monitor:
    """Keeps `Connections` up to date, and disconnects. To be made before the clients' socket is
    bound: libzmq waits until somebody receives what it reports."""

    address = "inproc://clients-monitor"

    def __init__(self, context: Context, connections: Connections) -> None:
        self.channel = context.connect(zmq.PAIR, self.address)
        self.limits = ConnectionLimits()
        self._connections = connections
        self._num_disconnected: Counter[str] = Counter()
        """clients, by the reason"""
        self._refused: list[tuple[Connection, str]] = []
        """connections that are to be ended, and why"""
        self.inner = b""
        """endpoint, as it is bound, at which the pipeline's own processes are clients"""

    def handle(self) -> None:
        """Every event up to now."""
        self._take_events()
        while self._refused:
            self.disconnect(*self._refused.pop())

    def disconnect(self, connection: Connection, reason: str) -> None:
        """Ends a connection. Its first use with a reason is logged, others are counted."""
        if connection.is_gone:
            return
        connection.was_cut_off = True
        self._connections.leave(connection)
        self._num_disconnected[reason] += 1
        if self._num_disconnected[reason] == 1:
            who = connection.host or "this machine"
            log.warning("disconnected a client at %s (more are only counted): %s", who, reason)
        self._shut_down(connection)

    @property
    def num_disconnected(self) -> int:
        """Clients that were disconnected, for any reason."""
        return self._num_disconnected.total()

    def _take_events(self) -> None:
        while self.channel.has_message:
            event = parse_monitor_message(self.channel.socket.recv_multipart())
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                is_inner = event["endpoint"] == self.inner
                connection = self._connections.accepted(fd, is_inner)
                connection.host = peer_host(fd)
                if reason := self.limits.add(connection):
                    self._refused.append((connection, reason))
            elif event["event"] == zmq.EVENT_DISCONNECTED and (
                closed := self._connections.closed(fd)
            ):
                self.limits.remove(closed)

    def _shut_down(self, connection: Connection) -> None:
        """libzmq may close the descriptor at any time, and the system give it to another client.
        A duplicate that was made before libzmq reported that belongs to this one."""
        try:
            duplicate = os.dup(connection.fd)
        except OSError:  # none is left, or libzmq was quicker
            return
        self._take_events()
        if self._connections.of(connection.fd) is connection:
            shut_down(duplicate)
        os.close(duplicate)
