"""A ZeroMQ socket that speaks one union of messages."""

import logging
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.backend import zmq_poll

log = logging.getLogger(__name__)
Received = TypeVar("Received")
HEARTBEAT_INTERVAL = 0.5  # seconds between two heartbeats
MAX_MISSED_HEARTBEATS = 10  # heartbeats that a peer may miss before the peer is given up
# maximum time of receiving from one socket in a row, so that other sockets and heartbeats get their
# turn
MAX_DRAIN_SECONDS = 0.1
# A longer frame ends its connection. Between our own processes, this only guards against a corrupt
# length, for which libzmq would allocate memory: a restarted detokenizer may get all tokens of
# 2,048 streams of 131,072 (1 GiB) at once. 4 GiB is also the maximum of MessagePack's lengths.
MAX_FRAME_BYTES = 1 << 32
# bytes by which a client's frame may exceed the limit and still be answered with an error; libzmq
# disconnects the sender of a longer frame before the frame is in memory
OVERSIZE_SLACK = 1 << 22
# exceptions of msgspec for data that can't be decoded, or encoded again as MessagePack:
# RecursionError for deep nesting, OverflowError for an integer over 64 bits
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


class Traffic:
    """Counters of all channels of this process, since its start."""

    messages_sent = 0
    messages_received = 0
    bad_frames = 0


traffic = Traffic()
_POLLIN, _DONTWAIT = int(zmq.POLLIN), int(zmq.DONTWAIT)
# integers, because an operation on pyzmq's enums takes a microsecond
_SNDMORE = int(zmq.SNDMORE) | _DONTWAIT


class Channel(Generic[Received]):
    """A socket that encodes sent messages and decodes received messages.

    A frame that does not decode is dropped and counted in `num_bad_frames`; only the first such
    frame is logged. Only the clients' queues have a limit: admission control bounds the others.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", receives: Any = None) -> None:
        self.socket = socket
        self.num_bad_frames = 0
        self._frames: list[zmq.Frame] = []  # frames of a message that is received in part
        self.encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._is_router = socket.type == zmq.ROUTER
        self._readable = [(socket, _POLLIN)]

    @property
    def last_endpoint(self) -> bytes:
        """The address of the last endpoint that the socket was bound to."""
        endpoint: bytes = self.socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return endpoint.rstrip(b"\0")

    @property
    def has_message(self) -> bool:
        return bool(zmq_poll(self._readable, 0))

    def send(self, message: object, to: bytes = b"") -> bool:
        """Send to the peer `to` (ROUTER only). Return False if the peer is disconnected."""
        return self.send_bytes(self.encode(message), to)

    def send_bytes(self, frame: bytes, to: bytes = b"") -> bool:
        return not self.try_send([to, frame] if self._is_router else [frame])

    def try_send(self, frames: list[bytes]) -> int:
        """Send frames. Return 0, EHOSTUNREACH (peer disconnected) or EAGAIN (queue full)."""
        send = self.socket.send
        try:
            for frame in frames[:-1]:
                send(frame, _SNDMORE)
            send(frames[-1], _DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return error.errno
            raise
        traffic.messages_sent += 1
        return 0

    def receive(self, seconds: float = MAX_DRAIN_SECONDS) -> Iterator[tuple[bytes, Received]]:
        """Yield the messages that wait, each with its peer's identity in front (ROUTER only)."""
        for frames in self.receive_frames(seconds):
            if len(frames) != 1 + self._is_router:
                self.count_bad_frame(f"got {len(frames)} frames, expected {1 + self._is_router}")
                continue
            try:
                message = self._decode(frames[-1].bytes)
            except DECODE_ERRORS as error:
                self.count_bad_frame(str(error))
            else:
                yield frames[0].bytes if self._is_router else b"", message

    def receive_frames(
        self, seconds: float = MAX_DRAIN_SECONDS, max_frames: int = sys.maxsize
    ) -> Iterator[list[zmq.Frame]]:
        """Yield the frames of waiting messages, for `seconds`; up to `max_frames` + 1 a message."""
        deadline, is_first = monotonic() + seconds, True
        while True:
            try:
                frame: zmq.Frame = self.socket.recv(_DONTWAIT, copy=False)
            except zmq.Again:
                return
            if len(self._frames) <= max_frames:
                self._frames.append(frame)
            if not frame.more:
                frames, self._frames = self._frames, []
                traffic.messages_received += 1
                yield frames
                if is_first and not self.has_message:
                    return  # usually one message waits; `zmq.Again` takes longer than this check
                is_first = False
            if monotonic() >= deadline:
                return

    def count_bad_frame(self, reason: str) -> None:
        """Count a dropped frame; log the first."""
        self.num_bad_frames += 1
        traffic.bad_frames += 1
        if self.num_bad_frames == 1:
            log.warning("dropped undecodable frame (further ones are only counted): %s", reason)
