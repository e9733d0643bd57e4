"""Kernel facts about a connection that libzmq owns, and the only way to close one.

libzmq reports neither the bytes queued for a connection nor the bytes received of an unfinished
message, and can't close a single connection. The kernel counts the bytes of a TCP connection
(`TCP_INFO`, Linux 4.6), and `shutdown(2)` ends any connection: libzmq then closes it.
"""

import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel

_COUNTERS = struct.Struct("QQ")
_COUNTERS_AT = 120
"""offset of `tcpi_bytes_acked` and `tcpi_bytes_received` in `struct tcp_info`"""
_INT = struct.Struct("i")
HANDSHAKE_BYTES, CURVE_HANDSHAKE_BYTES = 104, 564
"""of a REQ socket without an identity, at least"""
MAX_IDENTITY_BYTES = 255
MIN_MESSAGE_BYTES = 12
"""of a request on the wire"""
MAX_QUIET_HEARTBEATS = 2
"""after the first message of a client that libzmq seems to ignore"""


class Counters(NamedTuple):
    """Bytes of a TCP connection since it was accepted."""

    acked: int
    """sent, and acknowledged by the client's kernel"""
    received: int


def tcp_counters(fd: int) -> Counters | None:
    """Return None for another kind of connection, and for one that is closed already."""
    size = _COUNTERS_AT + _COUNTERS.size
    try:
        with _borrowed(fd) as end:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return None
    return Counters(*_COUNTERS.unpack_from(info, _COUNTERS_AT)) if len(info) == size else None


def is_all_read(fd: int) -> bool:
    """Return whether the client (on TCP: its kernel) has read all bytes that were written."""
    return _num_bytes(fd, termios.TIOCOUTQ) == 0


def num_unread_bytes(fd: int) -> int:
    """Return the number of bytes that have arrived and that libzmq has not read yet."""
    return _num_bytes(fd, termios.FIONREAD)


def peer_host(fd: int) -> str:
    """Return the address of the client's machine; empty for a connection within this machine, and
    for one that is closed already."""
    try:
        with socket.socket(fileno=os.dup(fd)) as end:
            return "" if end.family == socket.AF_UNIX else str(end.getpeername()[0])
    except OSError:
        return ""


def shut_down(fd: int) -> None:
    """End a connection in both directions, unless it is closed already."""
    with contextlib.suppress(OSError, ValueError), _borrowed(fd) as end:
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def duplicate(fd: int) -> Iterator[int]:
    """Yield another descriptor of a connection, which nobody else closes; -1 if none is left, or
    the connection is closed already."""
    try:
        number = os.dup(fd)
    except OSError:
        yield -1
        return
    try:
        yield number
    finally:
        os.close(number)


def take_events(monitor: Channel[Any]) -> Iterator[tuple[int, bytes | None]]:
    """Yield libzmq's events up to now: the descriptor of a connection, and the endpoint that
    accepted it; None if the connection is closed."""
    while monitor.has_message:
        event = parse_monitor_message(monitor.socket.recv_multipart())
        is_closed = event["event"] == zmq.EVENT_DISCONNECTED
        if is_closed or event["event"] == zmq.EVENT_ACCEPTED:
            yield int(event["value"]), None if is_closed else event["endpoint"]


def _num_bytes(fd: int, question: int) -> int:
    """Return the result of an ioctl; 0 for a connection that is closed already."""
    try:
        return int(_INT.unpack(fcntl.ioctl(fd, question, bytes(_INT.size)))[0])
    except OSError:
        return 0


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Yield libzmq's descriptor as a socket. Raises OSError if it is closed already."""
    end = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    try:
        yield end
    finally:
        end.detach()


class ConnectionTraffic:
    """Bytes and messages that went through one connection."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.num_messages = 0
        """received"""
        self.num_given = 0
        """bytes of messages that libzmq was given to send, at least"""
        self.num_read = 0
        """of them, bytes that the client had read at the last `update_num_read`"""
        self.largest = 0
        """bytes of the largest message given"""
        self._num_read_before = 0
        self._num_messages_before = self._num_received_before = self._num_busy_heartbeats = 0
        self._num_received_last = self._num_quiet_heartbeats = self._identity_bytes = 0

    @property
    def num_queued(self) -> int:
        """Bytes that libzmq and the kernel had for the client at the last `update_num_read`."""
        return self.num_given - self.num_read

    def update_num_read(self) -> None:
        """Query the kernel, which knows of a connection other than TCP only whether all is read."""
        counters = tcp_counters(self._fd)
        if counters:
            self.num_read = max(self.num_read, counters.acked)
            self.num_given = max(self.num_given, self.num_read)  # libzmq sends more than messages
        elif is_all_read(self._fd):
            self.num_read = self.num_given

    def take_progress(self) -> int:
        """Return the number of bytes that were read since the last call."""
        before, self._num_read_before = self._num_read_before, self.num_read
        return self.num_read - before

    def num_unfinished(self, num_received: int) -> int:
        """Return the bytes since the last message, of all received (at most)."""
        self._forget_before(num_received)
        return num_received - self._num_received_before

    def num_busy_heartbeats(self, is_receiving: bool) -> int:
        """Return at how many heartbeats bytes were arriving since the last whole message."""
        self._forget_before(0)
        self._num_busy_heartbeats += is_receiving
        return self._num_busy_heartbeats

    def _forget_before(self, num_received: int) -> None:
        if self._num_messages_before != self.num_messages:
            self._num_messages_before, self._num_busy_heartbeats = self.num_messages, 0
            self._num_received_before = num_received

    def is_ignored(self, counters: Counters | None, identity_bytes: int, is_curve: bool) -> bool:
        """Return whether libzmq has read more than a handshake, then nothing for some heartbeats,
        and no message. Without counters, a client that has sent nothing looks the same.

        identity_bytes: of the shortest identity that a client has chosen; 0 if none has. It is
        remembered: when that client leaves, libzmq still ignores this one."""
        known = filter(None, (self._identity_bytes, identity_bytes))
        identity_bytes = self._identity_bytes = min(known, default=0)
        num_received = least = 0
        patience = MAX_MISSED_HEARTBEATS
        if counters:
            num_received = counters.received - num_unread_bytes(self._fd)
            least = (CURVE_HANDSHAKE_BYTES if is_curve else HANDSHAKE_BYTES) + MIN_MESSAGE_BYTES
            least += identity_bytes or MAX_IDENTITY_BYTES
            patience = MAX_QUIET_HEARTBEATS if identity_bytes else patience
        if self.num_messages or num_received < least or not (counters or identity_bytes):
            return False
        if num_received > self._num_received_last:
            self._num_received_last, self._num_quiet_heartbeats = num_received, 0
        self._num_quiet_heartbeats += 1
        return self._num_quiet_heartbeats > patience
