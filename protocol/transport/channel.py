"""A ZeroMQ socket that speaks one union of messages."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from penstock.protocol.transport.curve import secure_server

log = logging.getLogger(__name__)
Received = TypeVar("Received")
Item = TypeVar("Item")


class Traffic:
    """What went through all channels of this process, since its start."""

    messages_sent = 0
    messages_received = 0
    bad_frames = 0


traffic = Traffic()

HEARTBEAT_INTERVAL = 0.5
"""seconds between two heartbeats"""
MAX_MISSED_HEARTBEATS = 10
"""heartbeats missed after which a peer is given up"""
MAX_DRAIN_SECONDS = 0.1
"""seconds for which messages are taken from one socket in a row: whatever comes in, other sockets
and heartbeats have their turn"""
MAX_FRAME_BYTES = 1 << 32
"""A longer frame ends its connection. Between our own processes this only guards against a length
that is garbage, for which libzmq would get memory: a new detokenizer may be sent all tokens of
2,048 streams of 131,072 (1 GiB) at once. 4 GiB is also the most that MessagePack's lengths say."""
OVERSIZE_SLACK = 1 << 22
"""A client's frame that is longer than allowed by up to so much is refused with a sentence; at a
longer one libzmq hangs up before it is in memory."""
CLUSTER = "cluster://"
"""before a name that a `Network` knows the addresses of"""
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
"""exceptions of msgspec for data that can't be decoded, or passed on in MessagePack: RecursionError
for deep nesting, OverflowError for an integer over 64 bits"""


class Network(zmq.Context["zmq.Socket[bytes]"]):
    """A context whose sockets find each other by name, `cluster://NAME`, on any machine."""

    handlers: list[tuple["Channel[Any]", Callable[[], None]]]
    """what must be attended to for that: sockets, and what to do when something waits there"""

    def bind(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        """Binds a socket, which has its options, and makes its addresses known."""
        raise NotImplementedError

    def connect(self, socket: "zmq.Socket[bytes]", endpoint: str, wait: bool = True) -> None:
        """Connects a socket, which has its options, to wherever the name is bound, now and later.

        Where the name is not known, it `wait`s for it, or does without: then what is sent before is
        dropped. A socket that waited counts on its messages: see `on_return`.
        """
        raise NotImplementedError

    def on_connected(self, socket: "zmq.Socket[bytes]", handler: Callable[[], None]) -> None:
        """Calls `handler` whenever a socket that waited is connected."""
        raise NotImplementedError

    def on_return(self, socket: "zmq.Socket[bytes]", handler: Callable[[], None]) -> None:
        """Calls `handler` when a connection was lost between processes that live on, and came back:
        messages may be lost. Without a handler that ends the process, which starts afresh."""
        raise NotImplementedError


class Channel(Generic[Received]):
    """Encodes what is sent and decodes what is received.

    A frame that does not decode is counted in `num_bad_frames`, the first one is logged, and it is
    dropped. Only the clients' queues have a limit of their own: the gateway's admission bounds what
    is in the others.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", receives: Any = None) -> None:
        self.socket = socket
        self.num_bad_frames = 0
        self._frames: list[zmq.Frame] = []
        """of a message that `receive_uncopied` has in hand"""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._is_router = socket.type == zmq.ROUTER

    @property
    def has_message(self) -> bool:
        """Whether a message waits at the socket."""
        return bool(self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # type: ignore

    def send(self, message: object, to: bytes = b"") -> bool:
        """Sends to the peer `to` (ROUTER only); False if that peer is gone."""
        return self.send_bytes(self._encode(message), to)

    def encode(self, message: object) -> bytes:
        """For `send_bytes`, where one message goes to several peers."""
        return self._encode(message)

    def send_bytes(self, frame: bytes, to: bytes = b"") -> bool:
        """Sends an encoded message; False if the peer is gone."""
        return self.send_frames([to, frame] if self._is_router else [frame])

    def send_frames(self, frames: list[bytes]) -> bool:
        """Sends encoded frames, the peer's identity first where this is a ROUTER."""
        return not self.try_send(frames)

    def try_send(self, frames: list[bytes]) -> int:
        """As `send_frames`: 0, or zmq.EHOSTUNREACH (the peer is gone), or zmq.EAGAIN (its queue is
        full)."""
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return error.errno
            raise
        traffic.messages_sent += 1
        return 0

    def receive(self) -> Iterator[tuple[bytes, Received]]:
        """The messages that wait at the socket now: (identity of the peer, message)."""
        for frames in self.receive_frames():
            message = self.decode(frames)
            if message is not None:
                yield frames[0], message

    def receive_frames(self) -> Iterator[list[bytes]]:
        """Frames that wait at the socket now; after MAX_DRAIN_SECONDS a next call has the rest."""
        return self._take_turn(lambda: self.socket.recv_multipart(zmq.DONTWAIT))

    def receive_uncopied(self, max_frames: int) -> Iterator[list[zmq.Frame]]:
        """As `receive_frames`, uncopied. Of a message that has more frames the first `max_frames`
        and one more are left, however many it has."""
        deadline = monotonic() + MAX_DRAIN_SECONDS
        while True:
            try:
                frame: zmq.Frame = self.socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if len(self._frames) <= max_frames:
                self._frames.append(frame)
            if not frame.more:
                frames, self._frames = self._frames, []
                traffic.messages_received += 1
                yield frames
            if monotonic() >= deadline:
                return

    def _take_turn(self, receive: Callable[[], Item]) -> Iterator[Item]:
        deadline = monotonic() + MAX_DRAIN_SECONDS
        while True:
            try:
                item = receive()
            except zmq.Again:
                return
            traffic.messages_received += 1
            yield item
            if monotonic() >= deadline:
                return

    def decode(self, frames: list[bytes]) -> Received | None:
        """The message in the last frame, or None if there is none."""
        if len(frames) == 1 + self._is_router:
            try:
                return self._decode(frames[-1])  # type: ignore[no-any-return]
            except DECODE_ERRORS as error:
                reason = str(error)
        else:
            reason = f"{len(frames)} frames"
        self.num_bad_frames += 1
        traffic.bad_frames += 1
        if self.num_bad_frames == 1:
            log.warning("dropped a frame that is no message (more are only counted): %s", reason)
        return None


def bind(
    context: "zmq.Context[Any]",
    kind: int,
    endpoint: str,
    receives: Any,
    max_bytes: int = MAX_FRAME_BYTES,
    keys: str = "",
    options: Mapping[int, int] = MappingProxyType({}),
    monitor: str = "",
) -> Channel[Any]:
    """A bound channel.

    `keys`, a folder, makes it speak CURVE; `options` are libzmq's, by number; to the PAIR socket
    that is connected to `monitor` libzmq tells of every peer that comes or goes. Raises
    zmq.ZMQError with the address in it if that is taken, and KeysError.
    """
    socket = _socket(context, kind, endpoint, max_bytes)
    if monitor:
        socket.monitor(monitor, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    if keys:
        secure_server(socket, Path(keys))
    for option, value in options.items():
        socket.setsockopt(option, value)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    channel: Channel[Any] = Channel(socket, receives)
    bind_also(channel, endpoint)
    return channel


def bind_also(channel: Channel[Any], endpoint: str) -> None:
    """Binds a channel, perhaps to one more endpoint. Raises zmq.ZMQError as `bind`."""
    socket = channel.socket
    try:
        if isinstance(socket.context, Network) and endpoint.startswith(CLUSTER):
            socket.context.bind(socket, endpoint)
        else:
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise zmq.ZMQError(error.errno, f"{error} ({endpoint})") from error


def last_endpoint(channel: Channel[Any]) -> bytes:
    """The address of the last endpoint that a channel was bound to."""
    endpoint: bytes = channel.socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return endpoint.rstrip(b"\0")


def connect(
    context: "zmq.Context[Any]",
    kind: int,
    endpoint: str,
    receives: Any = None,
    identity: bytes = b"",
    max_queue: int = 0,
    wait: bool = True,
    on_return: Callable[[], None] | None = None,
) -> Channel[Any]:
    """A connected channel; the peer may come later. `max_queue`: the most messages that wait for it
    (0: any number); `wait`, `on_return`: as in `Network`."""
    socket = _socket(context, kind, endpoint)
    socket.setsockopt(zmq.SNDHWM, max_queue)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    if isinstance(context, Network) and endpoint.startswith(CLUSTER):
        context.connect(socket, endpoint, wait)
        if on_return:
            context.on_return(socket, on_return)
    else:
        socket.connect(endpoint)
    return Channel(socket, receives)


def _socket(
    context: "zmq.Context[Any]", kind: int, endpoint: str, max_bytes: int = MAX_FRAME_BYTES
) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    return socket
