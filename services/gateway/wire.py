"""What the kernel knows of a client's connection, and the only way to end one.

libzmq owns the connections and reports neither what it has queued for one of them nor what it has
received of an unfinished message, and it can't close one. The kernel counts the bytes of a TCP
connection (`TCP_INFO`, Linux 4.6), and `shutdown(2)` ends any connection: libzmq then closes it.
"""

import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from typing import NamedTuple

_COUNTERS = struct.Struct("QQ")
_COUNTERS_AT = 120
"""where `tcpi_bytes_acked` and `tcpi_bytes_received` are in `struct tcp_info`"""
_INT = struct.Struct("i")


class Counters(NamedTuple):
    """Bytes of a TCP connection since it was accepted."""

    acked: int
    """sent, and acknowledged by the client's kernel"""
    received: int


def tcp_counters(fd: int) -> Counters | None:
    """Returns None for another kind of connection, and where it is closed already."""
    size = _COUNTERS_AT + _COUNTERS.size
    try:
        with _borrowed(fd) as end:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return None
    return Counters(*_COUNTERS.unpack_from(info, _COUNTERS_AT)) if len(info) == size else None


def is_all_read(fd: int) -> bool:
    """Whether the client has read all that was written to the connection (for a TCP connection:
    its kernel has)."""
    try:
        (num_bytes,) = _INT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(_INT.size)))
    except OSError:
        return True  # it is closed
    return bool(num_bytes == 0)


def peer_host(fd: int) -> str:
    """The address of a client's machine; empty for a connection within this one, and for one that
    is closed already."""
    try:
        with socket.socket(fileno=os.dup(fd)) as end:
            return "" if end.family == socket.AF_UNIX else str(end.getpeername()[0])
    except OSError:
        return ""


def shut_down(fd: int) -> None:
    """Ends a connection in both directions."""
    with contextlib.suppress(OSError), _borrowed(fd) as end:  # it may be closed already
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor of libzmq's as a socket. Raises OSError where it is closed already."""
    end = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    try:
        yield end
    finally:
        end.detach()
