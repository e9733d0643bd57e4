"""Limits of connections: how many there may be, and what waits for the client of each."""

import resource
from collections import Counter

from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.protocol.transport.socket_info import (
    Counters,
    is_all_read,
    num_unread_bytes,
    tcp_counters,
)

MAX_CONNECTIONS = 4096
"""of a gateway with as many descriptors: libzmq keeps some 50 KB for each connection"""
RESERVED_DESCRIPTORS = 256
"""for the pipeline's own connections and files"""
TOO_MANY = "too many connections; the limit depends on its limit of open files (ulimit -n)"
TOO_MANY_OF_ONE = "too many connections from this address"
TOO_MANY_SILENT = "too many connections that have not sent a request, or shown a key"


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


HANDSHAKE_BYTES, CURVE_HANDSHAKE_BYTES = 104, 564
"""of a REQ socket without an identity, at least"""
MAX_IDENTITY_BYTES = 255
MIN_MESSAGE_BYTES = 12
"""of a request on the wire"""
MAX_QUIET_HEARTBEATS = 2
"""after the first message of a client that libzmq seems to ignore"""


class ConnectionTraffic:
    """Bytes and messages that went through one connection."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.num_messages = 0
        """received"""
        self.num_queued = 0
        """bytes that libzmq and the kernel have for the client; updated by `update_num_read`"""
        self.num_read = 0
        """bytes that the client had read at the last `update_num_read`"""
        self.largest = 0
        """bytes of the largest message given"""
        self._num_read_before = 0
        self._num_messages_before = self._num_received_before = self._num_busy_heartbeats = 0
        self._num_received_last = self._num_quiet_heartbeats = self._identity_bytes = 0

    def update_num_read(self) -> None:
        """Query the kernel, which knows of a connection other than TCP only whether all is read."""
        num_given = self.num_read + self.num_queued
        if counters := tcp_counters(self._fd):
            self.num_read = max(self.num_read, counters.acked)
        elif is_all_read(self._fd):
            self.num_read = num_given
        self.num_queued = max(0, num_given - self.num_read)  # libzmq sends more than messages

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
        """Return whether libzmq has read more than a handshake, but no message, and then nothing.

        Without counters, a client that has sent nothing looks the same.

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
