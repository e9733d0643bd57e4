"""A client's connection to the gateway, which may be lost and come back."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.launch.errors import ClientError
from penstock.launch.session import Answer, Session
from penstock.protocol.client import (
    MSGPACK,
    AbortReply,
    DetokenizeReply,
    ErrorReply,
    GenerateReply,
    Request,
    TokenizeReply,
)
from penstock.protocol.keys import KeysError, secure_client
from penstock.protocol.sockets import MAX_FRAME_BYTES, POLITE_BYTES
from penstock.protocol.status import StatusReply

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
Kind = TypeVar("Kind", GenerateReply, TokenizeReply, DetokenizeReply, AbortReply, StatusReply)
REFUSED = "the gateway refuses this client: its key is unknown there, or only one of them has keys"
MAX_HANG_UPS = 3
"""connections lost after which a question so long that the gateway may hang up at it is given up"""
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def expect(answer: Answer, kind: type[Kind]) -> Kind:
    """The reply to a question that is answered. Raises RequestError."""
    reply = answer.result()
    assert isinstance(reply, kind)  # noqa: S101  the session pairs them by kind
    return reply


class Connection:
    """A DEALER socket, the monitor that tells when it is connected, and what was asked on it.

    Every question is asked once on each connection until it is answered: the gateway that sits at
    the end of a new one has perhaps not heard of it. Where the gateway refuses our key, or one side
    has keys and the other has none, every question is answered with an error. (A gateway of another
    key than ours says nothing: it is as if none were there.)
    """

    def __init__(self, endpoint: str, keys: str | Path | None, client: str) -> None:
        """Raises ClientError for keys that can't be read."""
        self._context = zmq.Context()
        self._session = Session()
        self._is_connected = False
        self._is_refused = False
        self._num_hang_ups: Counter[bytes] = Counter()
        """by the number of the question, of those longer than POLITE_BYTES"""
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # what a lost connection has queued is dropped
        if keys:
            self._secure(Path(keys), client)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | REFUSALS | zmq.EVENT_DISCONNECTED
        )
        # "*" is every interface to a server, and no address to a client
        self.socket.connect(endpoint.replace("://*:", "://127.0.0.1:"))

    def ask(self, question: Request) -> Answer:
        """Sends a question, now or when there is a connection."""
        self.take()
        answer = self._session.ask(question)
        if self._is_connected:
            self._send(answer)
        elif self._is_refused:
            self._fail(answer, REFUSED)
        self.take()  # ZeroMQ signals changes, and the send may have swallowed one
        return answer

    def take(self) -> bool:
        """Takes in everything that has come, and does not wait; True if it is a sign of a gateway,
        which a connection is not that fails before it is one."""
        is_sign = False
        while True:
            if self.monitor.poll(0):
                is_sign |= self._on_event(recv_monitor_message(self.monitor)["event"])
            elif self.socket.poll(0):
                self._session.receive(self.socket.recv_multipart())
                is_sign = True
            else:
                return is_sign

    def close(self) -> None:
        """Sends what is queued: waits for it, for a second at most."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self._context.term()

    def _secure(self, keys: Path, client: str) -> None:
        try:
            secure_client(self.socket, keys, client)
        except KeysError as error:
            self._context.destroy(linger=0)
            raise ClientError(str(error)) from error

    def _on_event(self, event: int) -> bool:
        was_connected = self._is_connected
        self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._is_refused = not self._is_connected and (self._is_refused or bool(event & REFUSALS))
        for answer in self._session.unanswered():
            if self._is_connected:
                self._send(answer)
            elif self._is_refused:
                self._fail(answer, REFUSED)  # libzmq does not try a refused key again
            elif was_connected and len(answer.frames[1]) > POLITE_BYTES:
                self._count_hang_up(answer)
        return was_connected or self._is_connected or self._is_refused

    def _count_hang_up(self, answer: Answer) -> None:
        number, frame = answer.frames
        self._num_hang_ups[number] += 1
        if self._num_hang_ups[number] == MAX_HANG_UPS:
            times = f"the gateway hung up {MAX_HANG_UPS} times"
            self._fail(answer, f"request has {len(frame)} bytes, at which {times}")

    def _fail(self, answer: Answer, reason: str) -> None:
        reply = ErrorReply(code="failed", message=reason, request_id=answer.request_id or None)
        self._session.receive([answer.number, MSGPACK.encode(reply)])

    def _send(self, answer: Answer) -> None:
        with contextlib.suppress(zmq.Again):  # the connection is lost; the next one will do
            self.socket.send_multipart(answer.frames, zmq.DONTWAIT)
