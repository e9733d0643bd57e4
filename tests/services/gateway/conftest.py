"""The real gateway, with a client, a tokenizer and a scheduler that the test plays."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from penstock.protocol.config import Config
from penstock.protocol.messages.client import MSGPACK, Codec, GenerateRequest, Request, TextDelta
from penstock.protocol.messages.pipeline import (
    Heartbeat,
    TextDeltas,
    TokenizeDone,
    ToScheduler,
    ToTokenizer,
)
from penstock.protocol.transport.context import Context, Endpoints, drain, secure_client
from penstock.services.gateway.process import Gateway

TIMEOUT = 60_000
PROMPT = list(range(5))


class Timer:
    """A call that comes when the test says so."""

    def __init__(self, seconds: float, function: Callable[[], None], timers: list["Timer"]) -> None:
        self.seconds = seconds
        self.fire = function
        self._timers = timers
        timers.append(self)

    def cancel(self) -> None:
        self._timers.remove(self)


class GatewayHarness:
    """A gateway that runs while the test waits for a message."""

    def __init__(self, context: Context, folder: Path, config: Config) -> None:
        self.context = context
        at = Endpoints(config.endpoint, *(f"ipc://{folder}/{n}" for n in Endpoints._fields[1:]))
        places = [at._replace(requests=f"{at.requests}{n or ''}") for n in range(config.dp)]
        process = SimpleNamespace(
            name="gateway.1",
            config=config,
            incarnation=3,
            log=logging.getLogger("gateway"),
            context=context,
            endpoints=at,
            all_endpoints=places,
            by_model=lambda: [process],
        )
        self.timers: list[Timer] = []
        self.reports = 0
        self.replica = -1
        """of the latest task"""
        self.schedulers = [context.bind(zmq.PULL, one.requests, ToScheduler) for one in places]
        self.gateway = Gateway(process, lambda s, f: Timer(s, f, self.timers))  # type: ignore[arg-type]
        self.tokenizer = context.connect(zmq.DEALER, at.tokenizers, ToTokenizer, b"t")
        self.detokenizer = context.connect(zmq.PUSH, at.results)
        where = self.gateway.clients.channel.socket.getsockopt(zmq.LAST_ENDPOINT)
        self.endpoint = where.decode().rstrip("\0")  # type: ignore[union-attr]
        self._poller = zmq.Poller()
        for channel, _ in self.gateway.handlers:
            self._poller.register(channel.socket, zmq.POLLIN)

    def run_until(self, condition: Callable[[], Any]) -> None:
        """Let the gateway handle messages until a condition is true."""
        self.gateway.after_turn()  # a timer may have fired
        while not condition():
            assert self._poller.poll(TIMEOUT), "no message has arrived"
            self.run_once()

    def run_once(self) -> None:
        """Let the gateway handle the messages that wait."""
        drain(self.gateway.handlers)
        self.gateway.after_turn()

    def connect_inside(self, **options: int) -> "zmq.Socket[bytes]":
        """Return a client where our HTTP servers connect."""
        return self.connect(None, self.gateway.connections.inner.decode(), **options)

    def connect(
        self,
        keys: Path | None = None,
        endpoint: str = "",
        client: str = "client",
        **options: int,
    ) -> "zmq.Socket[bytes]":
        """Return a client."""
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if keys:
            secure_client(socket, keys, client)
        for option, value in options.items():
            socket.setsockopt(getattr(zmq, option), value)
        socket.connect(endpoint or self.endpoint)
        return socket

    def send(self, socket: "zmq.Socket[bytes]", *requests: Request) -> None:
        for one in requests:
            socket.send(MSGPACK.encode(one))

    def submit(self, socket: "zmq.Socket[bytes]", *request_ids: str, **fields: Any) -> None:
        """Send requests, and let the gateway accept them."""
        self.send(socket, *(request(one, **fields) for one in request_ids))
        self.run_until(lambda: all(map(self.gateway.ledger.get, request_ids)))

    def receive_reply(self, socket: "zmq.Socket[bytes]", codec: Codec = MSGPACK) -> Any:
        """Return the next reply to a client."""
        return codec.decode_reply(self.receive_frames(socket)[-1])

    def receive_frames(self, socket: "zmq.Socket[bytes]") -> list[bytes]:
        """Return the frames of the next reply to a client, without decoding them."""
        self._poller.register(socket, zmq.POLLIN)
        self.run_until(lambda: socket.poll(0))
        self._poller.unregister(socket)
        return socket.recv_multipart()

    def send_tokens(self, request_id: str, begin: int, end: int, **fields: Any) -> None:
        """Send tokens `begin` to `end` from a detokenizer, of one character each."""
        entry = self.gateway.ledger.get(request_id)
        assert entry
        delta = TextDelta(
            request_id=request_id,
            token_offset=begin,
            char_offset=begin,
            token_ids=list(range(begin, end)),
            text="x" * (end - begin),
            attempt=entry.attempt,
            prompt_tokens=len(PROMPT),
            **fields,
        )
        self.detokenizer.send(TextDeltas([delta]))
        is_last = "finish_reason" in fields
        self.run_until(lambda: entry.answer or (len(entry.token_ids) >= end and not is_last))

    def next_tokenizer_task(self) -> Any:
        """Return the tokenizer's next request."""
        if not len(self.gateway.default.tokenizers.peers):
            self.tokenizer.send(Heartbeat("tokenizer.1"))
            self.run_until(lambda: len(self.gateway.default.tokenizers.peers))
        assert self.tokenizer.socket.poll(TIMEOUT)
        return next(self.tokenizer.receive())[1]

    def tokenize(self) -> Any:
        """Return the request of the tokenizer's next task, which it passes on to `replica`."""
        message = self.next_tokenizer_task()
        task, self.replica = message.request, message.replica
        self.tokenizer.send(TokenizeDone(task.request_id, task.attempt, 7))
        peer = self.gateway.default.tokenizers.peers.get(b"t")
        assert peer
        self.run_until(lambda: (task.request_id, task.attempt) not in peer.work)
        return task

    def scheduler_messages(self, replica: int = 0) -> list[Any]:
        """Return the gateway's messages to a scheduler up to now."""
        self.gateway.default.router.release_everywhere("end", self.gateway.ledger.first_attempt)
        received: list[Any] = []
        while not received or getattr(received[-1], "request_id", "") != "end":
            assert self.schedulers[replica].socket.poll(TIMEOUT)
            received += [message for _, message in self.schedulers[replica].receive()]
        return [one for one in received if getattr(one, "request_id", "") != "end"]

    def run_heartbeats(self, number: int) -> None:
        """Run heartbeats; after two a client that has left is given up."""
        for _ in range(number):
            self.gateway.on_heartbeat()

    def is_empty(self) -> bool:
        """Nothing is held for any request."""
        ledger, tokenizers, connections = (
            self.gateway.ledger,
            self.gateway.default.tokenizers,
            self.gateway.connections,
        )
        totals = self.gateway.default.totals
        counts = (totals.num_bytes, totals.num_waiting, totals.num_waiting_tokens)
        held = [one.is_full for one in connections.by_fd.values()]
        work = [peer.work for peer in tokenizers.peers]
        pending = self.gateway.clients._pending
        queries = len(self.gateway.default.queries)
        empty = not (len(ledger) or queries or tokenizers.unassigned or pending or self.timers)
        return empty and not any([*counts, *held, *work])


def request(request_id: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, **{"prompt": PROMPT} | fields)


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[Callable[..., GatewayHarness]]:
    """Start a gateway with options."""
    context: Context = Context()

    def start(**options: Any) -> GatewayHarness:
        return GatewayHarness(
            context, tmp_path, Config(**{"endpoint": f"ipc://{tmp_path}/c"} | options)
        )

    yield start
    context.destroy(linger=0)
