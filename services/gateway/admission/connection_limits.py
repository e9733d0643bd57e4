"""Who may connect to the clients' socket, and what each client may leave unread or unfinished.

libzmq keeps any number of frames until the last of a message has arrived. So each heartbeat checks
how much each connection has received since its last message; on ipc, how often bytes were arriving.

libzmq silently ignores a client with the ZeroMQ identity of another client, until that one leaves:
more than a handshake was received, and no message. On ipc an idle client looks the same.
"""

import logging
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import zmq

from penstock.protocol.config import Config
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.protocol.transport.context import Context, stays_on_host
from penstock.protocol.transport.curve import ZAP_DOMAIN, secure_server
from penstock.protocol.transport.socket_info import (
    Counters,
    is_all_read,
    num_unread_bytes,
    tcp_counters,
)

log = logging.getLogger("gateway")
MAX_RECEIVE_QUEUE = 8
"""messages of one client that libzmq receives ahead; then the client has to wait"""
MAX_SEND_QUEUE = 4096
"""messages in libzmq's queue for one client; further output waits in the ledger"""
OPTIONS = {
    zmq.HANDSHAKE_IVL: 10_000,  # milliseconds in which a client shows its key
    zmq.RCVHWM: MAX_RECEIVE_QUEUE,
    # The connection of a machine that has vanished ends after 25 s: until then its client can't
    # reconnect with the same ZeroMQ identity.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
MAX_CONNECTIONS = 4096
"""of a gateway with as many descriptors: libzmq keeps some 50 KB for each connection"""
RESERVED_DESCRIPTORS = 256
"""for the pipeline's own connections and files"""
TOO_MANY = "too many connections; the limit depends on its limit of open files (ulimit -n)"
TOO_MANY_OF_ONE = "too many connections from this address"
TOO_MANY_SILENT = "too many connections that have not sent a request, or shown a key"


def bind_clients(
    context: Context, config: Config, inner: str, monitor: str, max_frame_bytes: int
) -> tuple[Channel[Any], bytes]:
    """Return the clients' socket, and the endpoint `inner` as it is bound. Raises as `bind`.

    inner: for the pipeline's own processes, without keys. monitor: receives events of connections.
    """
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
    options = {int(option): value for option, value in OPTIONS.items()}
    options[zmq.SNDHWM] = MAX_SEND_QUEUE
    channel: Channel[Any] = context.bind(
        zmq.ROUTER, endpoint, None, max_frame_bytes, options, monitor
    )
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

    def __init__(self, fd: int, is_inner: bool) -> None:
        """fd: libzmq's descriptor. is_inner: of a process of the pipeline; it names its clients."""
        self.fd = fd
        self.is_inner = is_inner
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
        if counters := tcp_counters(self.fd):
            self.num_read = max(self.num_read, counters.acked)
        elif is_all_read(self.fd):
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
            num_received = counters.received - num_unread_bytes(self.fd)
            least = (CURVE_HANDSHAKE_BYTES if is_curve else HANDSHAKE_BYTES) + MIN_MESSAGE_BYTES
            least += identity_bytes or MAX_IDENTITY_BYTES
            patience = MAX_QUIET_HEARTBEATS if identity_bytes else patience
        if self.num_messages or num_received < least or not (counters or identity_bytes):
            return False
        if num_received > self._num_received_last:
            self._num_received_last, self._num_quiet_heartbeats = num_received, 0
        self._num_quiet_heartbeats += 1
        return self._num_quiet_heartbeats > patience


KERNEL_BYTES = 1 << 23
"""more than the system receives ahead for one connection"""
EXPANSION = 32
"""bytes of memory for each byte of an unfinished message: 64 for an empty frame, which has 2"""
MAX_BUSY_HEARTBEATS = 2
"""at which bytes of one message arrive; a whole message takes milliseconds within a machine"""
IGNORED = (
    "its ZeroMQ identity is that of another client (choose another), or its message has no end"
)
UNFINISHED = "a message was begun that is longer than any request, or all that were begun are"


Watched = TypeVar("Watched", bound=ConnectionTraffic)


class ClientWatch:
    """Heartbeats of the clients' socket."""

    def __init__(self, config: Config, max_frame_bytes: int) -> None:
        self._may_be_curve = bool(config.curve_keys) or config.backend != "local"
        self._max_unfinished_bytes = config.max_open_bytes // EXPANSION
        self._max_frame_bytes = max_frame_bytes

    def bad_clients(
        self, connections: Iterable[Watched], waits: bool, identity_bytes: int
    ) -> Iterator[tuple[Watched, str]]:
        """Yield clients that libzmq ignores, and clients whose messages do not end, with reasons.

        waits: a message waits in libzmq's queue. identity_bytes: as in `is_ignored`.
        """
        unfinished: list[tuple[int, Watched]] = []
        num_messages = MAX_RECEIVE_QUEUE + 1 if waits else 1  # whole ones may wait
        limit = self._max_frame_bytes * num_messages + KERNEL_BYTES
        for one in connections:
            counters = tcp_counters(one.fd)
            shortest = 0 if one.is_inner else identity_bytes
            if one.is_ignored(counters, shortest, self._may_be_curve):
                yield one, IGNORED
            elif counters is None:
                is_receiving = not waits and num_unread_bytes(one.fd) > 0
                if one.num_busy_heartbeats(is_receiving) > MAX_BUSY_HEARTBEATS:
                    yield one, UNFINISHED
            elif num_bytes := one.num_unfinished(counters.received):
                unfinished.append((num_bytes, one))
        num_all = sum(num_bytes for num_bytes, _ in unfinished)
        for num_bytes, one in sorted(unfinished, key=lambda pair: -pair[0]):
            if num_bytes <= limit and num_all <= self._max_unfinished_bytes:
                break
            num_all -= num_bytes
            yield one, UNFINISHED
