"""Kernel facts about a connection that libzmq owns, and the only way to close a connection.

libzmq reports neither the bytes queued for a connection nor the bytes received of an unfinished
message, and can't close a single connection. The kernel counts the bytes of a TCP connection
(`TCP_INFO`, Linux 4.6), and `shutdown(2)` ends any connection: libzmq then closes it.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.protocol.transport.channel import Channel

_COUNTERS = struct.Struct("QQ")
_COUNTERS_AT = 120  # offset of `tcpi_bytes_acked` and `tcpi_bytes_received` in `struct tcp_info`
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("iII")  # `struct ucred`: process, user and group
IPV6_PREFIX = 64  # bits of an address that a provider assigns to one customer
MAX_KNOWN = 256  # hosts whose form is cached: a host from a header may have 64 KB
_SO_NWRITE = 0x1024  # bytes that macOS has yet to send


class Counters(NamedTuple):
    """Bytes of a TCP connection since it was accepted."""

    acked: int  # sent, and acknowledged by the client's kernel
    received: int


def tcp_counters(fd: int) -> Counters | None:
    """Return the counters of a TCP connection on Linux; None for others and when closed."""
    size = _COUNTERS_AT + _COUNTERS.size
    try:
        with _borrowed(fd) as end:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except (OSError, AttributeError):  # macOS has no TCP_INFO
        return None
    return Counters(*_COUNTERS.unpack_from(info, _COUNTERS_AT)) if len(info) == size else None


def is_all_read(fd: int) -> bool:
    """Return whether the client (on TCP: its kernel) has read all bytes that were written."""
    if sys.platform != "darwin":
        return _num_bytes(fd, termios.TIOCOUTQ) == 0
    try:
        with _borrowed(fd) as end:
            return end.getsockopt(socket.SOL_SOCKET, _SO_NWRITE) == 0
    except OSError:
        return True


def num_unread_bytes(fd: int) -> int:
    """Return the number of bytes that have arrived and that libzmq has not read yet."""
    return _num_bytes(fd, termios.FIONREAD)


def peer_host(fd: int) -> str:
    """Return the address of the client's machine; empty for this machine, or when not connected."""
    try:
        with socket.socket(fileno=os.dup(fd)) as end:
            return "" if end.family == socket.AF_UNIX else str(end.getpeername()[0])
    except OSError:
        return ""


def peer_process(fd: int) -> int:
    """Return the id of the process at the other end of a Unix socket; 0 if it is not known."""
    try:
        with _borrowed(fd) as end:
            found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return int(_CREDENTIALS.unpack(found)[0])
    except (OSError, AttributeError):  # macOS has no SO_PEERCRED
        return 0


@lru_cache(MAX_KNOWN)
def network_of(host: str) -> str:
    """Return the network of an IPv6 address; IPv4 addresses, also mapped, and names stay whole."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.version == 6 and not address.ipv4_mapped:
        return str(ip_network((address, IPV6_PREFIX), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def shut_down(fd: int) -> None:
    """End a connection in both directions, unless it is closed already."""
    with contextlib.suppress(OSError, ValueError), _borrowed(fd) as end:
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def duplicate(fd: int) -> Iterator[int]:
    """Yield a duplicate descriptor of a connection, which no other code closes; -1 on failure."""
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
    """Yield a descriptor and the endpoint that accepted it; None for a closed connection."""
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
