"""A client's connection to the gateway, which may be lost and come back.

After a loss, the client tries the next of several addresses in `--endpoint`.
"""

import contextlib
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.protocol.client.session import ClientError, PendingRequest, Session
from penstock.protocol.messages.client import (
    MSGPACK,
    AbortReply,
    AbortRequest,
    DetokenizeReply,
    ErrorReply,
    GenerateReply,
    Request,
    TokenizeReply,
)
from penstock.protocol.messages.status import StatusReply
from penstock.protocol.transport.channel import (
    MAX_DRAIN_SECONDS,
    MAX_FRAME_BYTES,
    OVERSIZE_SLACK,
    Channel,
)
from penstock.protocol.transport.context import (
    CLUSTER,
    Context,
    Handlers,
    KeysError,
    drain,
    secure_client,
    stays_on_host,
)

# up to 65535: libzmq would use the port modulo 65536
_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
ADDRESS = re.compile(rf"tcp://[\w.:;%*\[\]-]+:{_PORT}|ipc://.+", re.ASCII)


def check_addresses(endpoint: str) -> None:
    """Raise ClientError for an invalid address."""
    for address in endpoint.split(","):
        if not ADDRESS.fullmatch(address):
            meant = (
                f"; did you mean tcp://{address}?" if ADDRESS.fullmatch(f"tcp://{address}") else ""
            )
            raise ClientError(
                f"--endpoint: got {address!r}, expected tcp://HOST:PORT or ipc://PATH{meant}"
            )
        size, most = len(address.removeprefix("ipc://").encode()), zmq.IPC_PATH_MAX_LEN
        if address.startswith("ipc://") and size > most:
            raise ClientError(f"--endpoint: got a path of {size} bytes, expected at most {most}")


class Addresses:
    """Addresses of the gateway, separated by commas, and the current address."""

    def __init__(self, endpoint: str) -> None:
        # "*" is every interface to a server, not an address for a client
        usable = endpoint.replace("://*:", "://127.0.0.1:")
        self._all = list(dict.fromkeys(usable.split(",")))
        self.current = self._all[0]
        self._num_failures = 0  # since the latest connection
        self._refused_by: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_refused(self) -> bool:
        """True if all addresses have refused our key."""
        return len(self._refused_by) == len(self._all)

    def on_connected(self) -> None:
        """Note that the current address answers; earlier failures no longer count."""
        self._num_failures = 0
        self._refused_by.clear()

    def on_refused(self) -> None:
        """Note that the current address refuses our key; libzmq does not retry the address."""
        self._refused_by.add(self.current)

    def turn(self) -> bool:
        """Move to the next address that has not refused our key. Return False if none is left.

        Once a round, stay at the current address, which libzmq retries after a pause: otherwise a
        client would cycle through the addresses without a pause. Addresses that refused our key are
        tried again in the next round.
        """
        if self.current not in self._refused_by:
            self._num_failures += 1
            if self._num_failures % (len(self._all) + 1) == 0:
                self._refused_by.clear()
                return False
        here = self._all.index(self.current)
        others = self._all[here + 1 :] + self._all[:here]
        usable = (address for address in others if address not in self._refused_by)
        self.current = next(usable, self.current)
        return self.current != self._all[here]


DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
Kind = TypeVar("Kind", GenerateReply, TokenizeReply, DetokenizeReply, AbortReply, StatusReply)
REFUSED = "the gateway refuses this client: its key is unknown there, or only one of them has keys"
# lost connections after which a question that exceeds the gateway's limit is given up
MAX_HANG_UPS = 3
FORKED = "this client was made before a fork: make another one in the new process"
IN_USE = "another thread is using this client: give each thread a client of its own"
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
CONNECT_TIMEOUT = 2000  # milliseconds after which the next of several addresses is tried
TURN = 0.005  # seconds of taking replies in a row, if other tasks need turns between
# milliseconds between two of ZeroMQ's heartbeats, and of silence after which the next address is
# tried
HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT = 1000, 5000


def expect(pending: PendingRequest, kind: type[Kind]) -> Kind:
    """Return the reply to an answered question. Raises RequestError."""
    reply = pending.result()
    assert isinstance(reply, kind)  # noqa: S101  the session pairs them by kind
    return reply


class Connection:
    """A DEALER socket, the monitor of its connection, and its unanswered questions.

    Every question is sent once on each connection until it is answered: the gateway of a new
    connection may not know the question. If the gateway refuses our key, or only one side has keys,
    every question is answered with an error. (A gateway with an unexpected key never replies.)

    Only one of several addresses is connected at a time. When the connection is lost or fails, the
    monitor reports that libzmq retries, and the next address is tried instead.
    """

    def __init__(
        self,
        endpoint: str,
        keys: str | Path | None,
        client: str,
        context: Context | None = None,
        max_unread_bytes: float = math.inf,
    ) -> None:
        """Connect; raise ClientError for unreadable keys and an invalid address.

        endpoint: as in `Addresses`, or a name in a `Cluster` that is given as `context` and has the
        keys. `close` does not end a given context.
        """
        self._is_name = context is not None and endpoint.startswith(CLUSTER)
        if not self._is_name:
            check_addresses(endpoint)
        self._addresses = Addresses(endpoint)
        # True if the current address can't be connected, or its connection is lost
        self._is_failing = False
        self._context = context or Context()
        self._owns_context = context is None
        self._pid, self._thread = os.getpid(), threading.RLock()
        self._session = Session(max_unread_bytes)
        # called if messages still wait after the TURN of one `take`; None: `take` takes all
        self.on_rest: Callable[[], None] | None = None
        self.is_connected = False
        # lost connections by question number, for questions longer than OVERSIZE_SLACK
        self._num_hang_ups: Counter[bytes] = Counter()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # drop the queue of a lost connection
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | REFUSALS | zmq.EVENT_DISCONNECTED
        if len(self._addresses) > 1:
            events |= zmq.EVENT_CONNECT_RETRIED
            self.socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT)
            self.socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_TIMEOUT)
        self.monitor = self.socket.get_monitor_socket(events)
        self._has_sign = False
        self._replies: Channel[bytes] = Channel(self.socket)
        self._handlers: Handlers = [
            (Channel(self.monitor), self._on_monitor),
            (self._replies, self._on_reply),
        ]
        if keys and not self._is_name:
            self._secure(Path(keys), client)
        self._connect()

    def ask(self, question: Request) -> PendingRequest:
        """Send a question, now or once there is a connection. Raises ClientError after `leave`."""
        with self.used():
            self.take()  # notice a lost connection before the question is sent on it
            pending = self._session.ask(question)
            if self.is_connected:
                self._send(pending)
            elif self._addresses.is_refused:
                self._fail(pending, REFUSED)
            self.take()  # ZeroMQ signals changes, and the send may have consumed a signal
            return pending

    def ask_abort(self, request_id: str) -> list[PendingRequest]:
        """Send the messages that abort a request, or all answers to a prompt."""
        return [self.ask(abort) for abort in self._session.aborts(request_id)]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the sockets. Raises ClientError after `leave` or a fork, and in a second thread."""
        if self.socket.closed:
            raise ClientError("the client is closed; open another one")
        if os.getpid() != self._pid:
            raise ClientError(FORKED)
        if not self._thread.acquire(blocking=False):
            raise ClientError(IN_USE)
        try:
            yield
        finally:
            self._thread.release()

    def take(self) -> bool:
        """Handle all that has arrived, without waiting. Return True for a sign of a gateway.

        A sign is a reply or a change of the connection. A connection that fails before its
        handshake is not a sign.
        """
        self._has_sign = False
        self._take()
        while self._is_failing:
            self._try_next()
            self._take()
        while self._session.cut:
            self.ask(AbortRequest(request_id=self._session.cut.pop().request_id))
        return self._has_sign

    def _take(self) -> None:
        if self.on_rest is None:
            drain(self._handlers)
            return
        waiting = [handler for channel, handler in self._handlers if channel.has_message]
        for handler in waiting:
            handler()
        if waiting and any(channel.has_message for channel, _ in self._handlers):
            self.on_rest()

    def _on_monitor(self) -> None:
        self._has_sign |= self._on_event(recv_monitor_message(self.monitor)["event"])

    def _on_reply(self) -> None:
        seconds = MAX_DRAIN_SECONDS if self.on_rest is None else TURN
        for frames in self._replies.receive_frames(seconds):
            self._session.receive([frame.bytes for frame in frames])
        self._has_sign = True

    def leave(self) -> None:
        """Close the socket, in the thread that uses it; a forked process leaves it alone."""
        if self.socket.closed or os.getpid() != self._pid:
            return
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def close(self) -> None:
        """Wait after `leave`, for a second at most, until queued messages are sent."""
        if self._owns_context and os.getpid() == self._pid:
            self._context.term()

    def end(self) -> None:
        self.leave()
        self.close()

    def _secure(self, keys: Path, client: str) -> None:
        try:
            secure_client(self.socket, keys, client)
        except KeysError as error:
            self.end()
            raise ClientError(str(error)) from error

    def _connect(self) -> None:
        address = self._addresses.current
        self.socket.setsockopt(zmq.IPV6, "[" in address)
        if len(self._addresses) > 1 and not stays_on_host(address):
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT)
        self._context.connect_socket(self.socket, address, wait=False)

    def _try_next(self) -> None:
        self._is_failing = False
        last = self._addresses.current
        if self._addresses.turn():
            self.socket.disconnect(last)
            self._connect()

    def _on_event(self, event: int) -> bool:
        was_connected = self.is_connected
        self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_connected:
            self._is_failing = False
            self._addresses.on_connected()
            self.socket.poll(0)  # a send alone misses messages of the last millisecond
        elif event & REFUSALS:
            self._is_failing = True
            self._addresses.on_refused()
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._is_failing = True
        for pending in self._session.unanswered():
            if self.is_connected:
                self._send(pending)
            elif self._addresses.is_refused:
                self._fail(pending, REFUSED)  # libzmq does not try a refused key again
            elif was_connected and len(pending.frames[1]) > OVERSIZE_SLACK:
                self._count_hang_up(pending)
        return was_connected or self.is_connected or self._addresses.is_refused

    def _count_hang_up(self, pending: PendingRequest) -> None:
        number, frame = pending.frames
        self._num_hang_ups[number] += 1
        if self._num_hang_ups[number] == MAX_HANG_UPS:
            times = f"the gateway hung up {MAX_HANG_UPS} times"
            self._fail(pending, f"request has {len(frame)} bytes, at which {times}")

    def _fail(self, pending: PendingRequest, reason: str) -> None:
        reply = ErrorReply(code="failed", message=reason, request_id=pending.request_id or None)
        self._session.receive([pending.number, MSGPACK.encode(reply)])

    def _send(self, pending: PendingRequest) -> None:
        with contextlib.suppress(zmq.Again):  # the connection is lost: sent on the next connection
            self.socket.send_multipart(pending.frames, zmq.DONTWAIT)
