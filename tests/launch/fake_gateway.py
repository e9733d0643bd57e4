"""A gateway that sends the test's replies."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from penstock.protocol.messages.client import (
    MSGPACK,
    AbortReply,
    AbortRequest,
    GenerateReply,
    GenerateRequest,
    Reply,
    Request,
    StatusRequest,
    TextDelta,
    Usage,
    reply_frames,
)
from penstock.protocol.messages.status import StatusReply

Behaviour = Callable[[Request], list[Reply]]
TEXT = "one two"
STATUS: dict[str, Any] = {"model": "", "num_requests": 0, "num_bad_frames": 0}
STATUS |= {"tokenizers": {}, "schedulers": []}
"""what a reply about an idle pipeline must say, beside whether it is ready"""


def delta(request: GenerateRequest, first: int, last: int) -> TextDelta:
    """Characters `first` to `last` of TEXT, one a token."""
    return TextDelta(
        request_id=request.request_id or "",
        token_offset=first,
        char_offset=first,
        token_ids=list(range(first, last)),
        text=TEXT[first:last],
    )


def reply(request: GenerateRequest, text: str = TEXT) -> GenerateReply:
    return GenerateReply(
        request_id=request.request_id or "",
        text=text,
        token_ids=list(range(len(text))),
        finish_reason="stop",
        usage=Usage(prompt_tokens=1, cached_tokens=0, output_tokens=len(text)),
    )


def echo(request: Request) -> list[Reply]:
    """Answers with the prompt."""
    match request:
        case GenerateRequest(prompt=str(prompt)):
            return [reply(request, prompt)]
        case AbortRequest(request_id=request_id):
            return [AbortReply(request_id=request_id, found=True)]
        case StatusRequest(wait=wait):
            return [StatusReply(ready=wait, **STATUS)]
    return []


class Gateway:
    """A ROUTER in a thread; asked for nothing (`b""`) it ends."""

    def __init__(self, endpoint: str, behaviour: Behaviour) -> None:
        self.heard: list[Request] = []
        self._news = threading.Condition()
        self._behaviour = behaviour
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops what is beyond, silently
        self._socket.bind(endpoint)
        self._end = self._context.socket(zmq.PULL)
        self._end.bind("inproc://end")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End; twice does no harm."""
        if self._context.closed:
            return
        with self._context.socket(zmq.PUSH) as end:
            end.connect("inproc://end")
            end.send(b"")
            self._thread.join()
        self._context.term()

    def wait_for(self, num_requests: int) -> None:
        """Return when `num_requests` have come."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.heard) >= num_requests, timeout=60)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._end, zmq.POLLIN)
        with self._socket, self._end:
            while self._end not in dict(poller.poll()):
                *envelope, frame = self._socket.recv_multipart()
                request = MSGPACK.decode_request(frame)
                with self._news:
                    self.heard.append(request)
                    self._news.notify()
                for one in self._behaviour(request):
                    self._socket.send_multipart(reply_frames(envelope, MSGPACK.encode(one)))


@contextlib.contextmanager
def gateway(endpoint: str, behaviour: Behaviour = echo) -> Iterator[Gateway]:
    """Yield a gateway that lives as long as the block."""
    one = Gateway(endpoint, behaviour)
    try:
        yield one
    finally:
        one.close()
