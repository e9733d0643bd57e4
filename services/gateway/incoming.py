"""Messages of clients as they come in, and clients that send what no client sends."""

import logging
from collections.abc import Iterator
from typing import Any

import zmq

from penstock.protocol.checkpoint import max_request_bytes
from penstock.protocol.config import Config
from penstock.protocol.messages.client import codec_of
from penstock.protocol.transport.channel import OVERSIZE_SLACK, Channel, traffic
from penstock.services.gateway.connections import Client, Connection, Connections
from penstock.services.gateway.monitor import Monitor
from penstock.services.gateway.wire import tcp_counters

log = logging.getLogger("gateway")
MAX_FRAMES = 8
"""of a message, its sender's identity included"""
MAX_ENVELOPE_BYTES = 1024
"""of the frames before the request"""
MAX_QUEUE = 8
"""messages of one client that libzmq receives ahead; then the client has to wait"""
KERNEL_BYTES = 1 << 23
"""more than the system receives ahead for one connection"""
ENVELOPE = (
    f"a message has more than {MAX_FRAMES} frames, or {MAX_ENVELOPE_BYTES} bytes before the request"
)
EXPANSION = 32
"""bytes of memory that libzmq may need for each byte of an unfinished message: 64 for an empty
frame, which has two"""
IGNORED = "its ZeroMQ identity is that of another client, or its first message does not end"
UNFINISHED = "a message was begun that is longer than any request, or all that were begun are"


def max_frame_bytes(config: Config) -> int:
    """The limit of a frame of clients, at a longer one libzmq disconnects them."""
    return max_request_bytes(config) + OVERSIZE_SLACK


class Incoming:
    """Receives from the clients' socket. Who breaks a limit is disconnected.

    libzmq limits the bytes of a frame, but not the frames of a message, which it keeps until the
    last one has come. So `on_heartbeat` looks how much each connection has received since its last
    message came (TCP only).
    """

    def __init__(
        self, channel: Channel[Any], connections: Connections, monitor: Monitor, config: Config
    ) -> None:
        self._channel = channel
        self.connections = connections
        self._monitor = monitor
        self._max_bytes = max_frame_bytes(config)
        may_be_curve = config.keys or config.on != "local"
        self._max_handshake_bytes = 1024 if may_be_curve else 400  # with the longest identity
        self._max_unfinished_bytes = config.max_open_bytes // EXPANSION

    def receive(self) -> Iterator[tuple[Client, bytes]]:
        """The messages that wait, not decoded."""
        for frames in self._channel.receive_uncopied(MAX_FRAMES):
            self._monitor.handle()
            if connection := self._connection_of(frames[0]):
                if len(frames) > MAX_FRAMES or sum(map(len, frames[:-1])) > MAX_ENVELOPE_BYTES:
                    self._monitor.disconnect(connection, ENVELOPE)
                    continue
                *envelope, frame = (one.bytes for one in frames)
                yield Client(tuple(envelope), codec_of(frame), connection), frame

    def on_heartbeat(self) -> None:
        """Disconnects clients that send messages without an end: who has sent the most goes first
        where all of them together have sent too much."""
        unfinished: list[tuple[int, Connection]] = []
        # Messages that are complete may wait in libzmq's queue.
        limit = self._max_bytes * (MAX_QUEUE + 1 if self._channel.has_message else 1) + KERNEL_BYTES
        for connection in self.connections:
            counters = tcp_counters(connection.fd)
            if counters is None:
                continue
            if connection.is_ignored(counters.received, self._max_handshake_bytes):
                self._monitor.disconnect(connection, IGNORED)
            elif num_bytes := connection.num_unfinished(counters.received):
                unfinished.append((num_bytes, connection))
        num_all = sum(num_bytes for num_bytes, _ in unfinished)
        for num_bytes, connection in sorted(unfinished, key=lambda one: -one[0]):
            if num_bytes <= limit and num_all <= self._max_unfinished_bytes:
                break
            num_all -= num_bytes
            self._monitor.disconnect(connection, UNFINISHED)

    def _connection_of(self, frame: zmq.Frame) -> Connection | None:
        """The connection that a message came on; None if it can't be known."""
        try:
            fd = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # libzmq knows it for ZMTP 3 only
            self._drop("a client speaks ZMTP before version 3 (of libzmq 4)")
            return None
        connection = self.connections.of(fd)
        if connection.was_cut_off:
            return None
        if not connection.num_messages and not connection.is_gone:
            self._monitor.limits.spoke(connection)
        connection.num_messages += 1
        return connection

    def _drop(self, reason: str) -> None:
        self._channel.num_bad_frames += 1
        traffic.bad_frames += 1
        if self._channel.num_bad_frames == 1:
            log.warning("dropped a message (more are only counted): %s", reason)
