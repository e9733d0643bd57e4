"""What libzmq's monitor tells of the clients' socket.

A ROUTER learns of a peer that is gone only when it sends to it. The monitor tells at once, by file
descriptor, and every message carries the descriptor of the connection that it came on. An
accepted connection is told of before its first message comes.
"""

from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.protocol.sockets import connect
from penstock.services.gateway.connections import Connections


class Monitor:
    """Keeps `Connections` up to date. To be made before the clients' socket is bound: libzmq waits
    until somebody hears what it tells."""

    address = "inproc://clients-monitor"

    def __init__(self, context: "zmq.Context[Any]", connections: Connections) -> None:
        self.channel = connect(context, zmq.PAIR, self.address)
        self._connections = connections

    def handle(self) -> None:
        """Every event up to now."""
        socket = self.channel.socket
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore
            event = parse_monitor_message(socket.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.accepted(int(event["value"]))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connections.closed(int(event["value"]))
