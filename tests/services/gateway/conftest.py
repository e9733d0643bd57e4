"""The real gateway, with a client, a tokenizer and a scheduler that the test plays."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.config import Config
from penstock.protocol.messages import client as messages
from penstock.protocol.messages.client import JSON, MSGPACK, Codec, GenerateRequest
from penstock.protocol.messages.pipeline import (
    Goodbye,
    Heartbeat,
    ReleaseRequest,
    StreamDelta,
    TextDeltas,
    TokenizeDone,
    TokenizerReply,
    ToScheduler,
    ToTokenizer,
)
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.transport.context import Context, Endpoints, drain, secure_client
from penstock.protocol.transport.process import Identity
from penstock.services.gateway.process import Gateway
from penstock.services.gateway.request import Client, Connection, Request, Share
from penstock.services.gateway.requests import Requests

TIMEOUT = 60_000
PROMPT = list(range(5))
Socket = zmq.Socket[bytes]


class Timer:
    """A call that comes when the test says so."""

    def __init__(self, seconds: float, function: Callable[[], None], timers: list["Timer"]) -> None:
        self.seconds = seconds
        self.fire = function
        self._timers = timers
        timers.append(self)

    def cancel(self) -> None:
        self._timers.remove(self)


def process_of(context: Context, config: Any, places: list[Endpoints]) -> SimpleNamespace:
    """Return what the gateway uses of a `Process`."""
    return SimpleNamespace(
        name="gateway.1",
        config=config,
        incarnation=3,
        log=logging.getLogger("gateway"),
        context=context,
        endpoints=places[0],
        all_endpoints=places,
    )


class Harness:
    """A gateway that runs while the test waits for a message."""

    def __init__(self, context: Context, folder: Path, config: Config) -> None:
        at = Endpoints(config.endpoint, *(f"ipc://{folder}/{n}" for n in Endpoints._fields[1:]))
        places = [at._replace(requests=f"{at.requests}{n or ''}") for n in range(config.dp)]
        process = process_of(context, config, places)
        process.by_model = lambda: [process]
        self.replica = -1  # of the latest task
        self.num_reports = 0
        self.schedulers = [context.bind(zmq.PULL, place.requests, ToScheduler) for place in places]
        self.start(context, process)
        self.num_tokenizers = 0
        self.tokenizer_id = b"t"
        self.tokenizer = context.connect(zmq.DEALER, at.tokenizers, ToTokenizer, b"t")
        self.detokenizer = context.connect(zmq.PUSH, at.results)

    def start(self, context: Context, process: Any) -> None:
        self.context = context
        self.timers: list[Timer] = []
        self.gateway = Gateway(process, lambda s, f: Timer(s, f, self.timers))  # type: ignore[arg-type]
        self.ledger, self.status = self.gateway.ledger, self.gateway.status
        self.clients, self.connections = self.gateway.clients, self.gateway.connections
        self.endpoint = self.clients.channel.last_endpoint.decode()
        self._poller = zmq.Poller()
        for channel, _ in self.gateway.handlers:
            self._poller.register(channel.socket, zmq.POLLIN)

    @property
    def model(self) -> Requests:
        return self.gateway.default

    # ---- the gateway runs ----------------------------------------------------------------------

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

    def run_heartbeats(self, number: int) -> None:
        """Run heartbeats; after two a client that has left is given up."""
        for _ in range(number):
            self.gateway.on_heartbeat()

    # ---- the test as a client ------------------------------------------------------------------

    def connect_inside(self, **options: int) -> Socket:
        """Return a client where our HTTP servers connect."""
        return self.connect(None, self.connections.inner.decode(), **options)

    def connect(
        self, keys: Path | None = None, endpoint: str = "", client: str = "client", **options: Any
    ) -> Socket:
        """Return a client."""
        socket: Socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if keys:
            secure_client(socket, keys, client)
        for option, value in options.items():
            socket.setsockopt(getattr(zmq, option), value)
        socket.connect(endpoint or self.endpoint)
        return socket

    def leave(self, client: Socket) -> None:
        """Run the gateway until it hears that a connection is closed."""
        before = len(self.connections)
        client.close()
        self.run_until(lambda: len(self.connections) < before)

    def send(self, socket: Socket, *requests: messages.Request) -> None:
        for message in requests:
            socket.send(MSGPACK.encode(message))

    def submit(self, socket: Socket, *request_ids: str, **fields: Any) -> None:
        """Send requests, and let the gateway accept them."""
        self.send(socket, *(request(request_id, **fields) for request_id in request_ids))
        self.run_until(lambda: all(map(self.ledger.get, request_ids)))

    def ask(self, socket: Socket, *queries: messages.Request, waiting: int = 0) -> None:
        """Send queries for tokenizers until so many are open: by default these alone."""
        self.send(socket, *queries)
        self.run_until(lambda: len(self.model.queries) == (waiting or len(queries)))

    def receive_reply(self, socket: Socket, codec: Codec = MSGPACK) -> Any:
        """Return the next reply to a client."""
        return codec.decode_reply(self.receive_frames(socket)[-1])

    def receive_frames(self, socket: Socket) -> list[bytes]:
        """Return the frames of the next reply to a client, without decoding them."""
        self.wait_for(socket)
        return socket.recv_multipart()

    def wait_for(self, socket: Socket) -> None:
        """Run the gateway until a socket has a message."""
        self._poller.register(socket, zmq.POLLIN)
        self.run_until(lambda: socket.poll(0))
        self._poller.unregister(socket)

    # ---- the test as a tokenizer, scheduler and detokenizer ------------------------------------

    def get(self, request_id: str) -> Request:
        """Return an open request."""
        known = self.ledger.get(request_id)
        assert known
        return known

    def send_tokens(self, request_id: str, begin: int, end: int, **fields: Any) -> None:
        """Send tokens `begin` to `end` from a detokenizer, of one character each."""
        known = self.get(request_id)
        fields = {"prompt_tokens": len(PROMPT), "attempt": known.attempt} | fields
        self.detokenizer.send(TextDeltas([delta(begin, end, request_id, **fields)]))
        is_last = "finish_reason" in fields
        self.run_until(lambda: known.answer or (len(known.token_ids) >= end and not is_last))

    def start_tokenizer(self, name: str = "tokenizer.1") -> None:
        """Start the next incarnation of a tokenizer: the one before has died."""
        self.num_tokenizers += 1
        number = self.num_tokenizers
        self.tokenizer_id = Identity(name, 100 + number, number).encode()
        where = self.model.to_tokenizers.last_endpoint.decode()
        self.tokenizer = self.context.connect(zmq.DEALER, where, ToTokenizer, self.tokenizer_id)
        self.register_tokenizer(name)

    def register_tokenizer(self, name: str = "tokenizer.1") -> None:
        self.tokenizer.send(Heartbeat(name))
        peers = self.model.tokenizers.peers
        self.run_until(lambda: [peer.identity for peer in peers] == [self.tokenizer_id])

    def lose_tokenizer(self) -> None:
        self.tokenizer.send(Goodbye())
        self.run_until(lambda: not len(self.model.tokenizers.peers))

    def next_tokenizer_task(self) -> Any:
        """Return the tokenizer's next request."""
        if not len(self.model.tokenizers.peers):
            self.register_tokenizer()
        assert self.tokenizer.socket.poll(TIMEOUT)
        return next(self.tokenizer.receive())[1]

    def work(self) -> dict[object, Any]:
        """Return the work that the tokenizer has, by key."""
        [peer] = self.model.tokenizers.peers
        return peer.work

    def given(self) -> list[Any]:
        """Return the prompts that the tokenizer has."""
        return [work.message.prompt for work in self.work().values()]

    def tokenize(self) -> Any:
        """Return the request of the tokenizer's next task, which it passes on to `replica`."""
        message = self.next_tokenizer_task()
        task, self.replica = message.request, message.replica
        self.tokenizer.send(TokenizeDone(task.request_id, task.attempt, 7))
        self.run_until(lambda: (task.request_id, task.attempt) not in self.work())
        return task

    def answer_query(self, reply: Any, number: int | None = None) -> None:
        """Answer a query, by default the tokenizer's next task."""
        number = self.next_tokenizer_task().number if number is None else number
        self.tokenizer.send(TokenizerReply(number, reply))

    def report(self, runs: bool = True, epoch: int = 1, **fields: Any) -> None:
        """Send a scheduler's report, which the gateway handles."""
        status = SchedulerStatus(
            epoch=epoch, ready=runs, workers_ready=runs, num_steps=self.num_reports, **fields
        )
        self.num_reports += 1
        self.detokenizer.send(status)
        replica = self.model.router._replicas[status.replica]
        self.run_until(lambda: replica.status == status)

    def scheduler_messages(self, replica: int = 0) -> list[Any]:
        """Return the gateway's messages to a scheduler up to now."""
        self.model.router.release_everywhere("end", self.ledger.first_attempt)
        received: list[Any] = []
        while not received or getattr(received[-1], "request_id", "") != "end":
            assert self.schedulers[replica].socket.poll(TIMEOUT)
            received += [message for _, message in self.schedulers[replica].receive()]
        return [message for message in received if getattr(message, "request_id", "") != "end"]

    def releases(self, replica: int = 0) -> list[tuple[str, int]]:
        """Return the ids and attempts that a scheduler was told to release up to now."""
        found = self.scheduler_messages(replica)
        return [(its.request_id, its.attempt) for its in found if isinstance(its, ReleaseRequest)]

    def is_empty(self) -> bool:
        """Nothing is held for any request."""
        totals, tokenizers = self.model.totals, self.model.tokenizers
        held: list[Any] = [totals.num_bytes, totals.num_waiting, totals.num_waiting_tokens]
        held += [len(self.ledger), len(self.model.queries), len(tokenizers.unassigned)]
        held += [connection.is_full for connection in self.connections]
        held += [peer.work for peer in tokenizers.peers]
        return not any([*held, self.clients._pending, self.timers])


def request(request_id: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, **{"prompt": PROMPT} | fields)


def accepted(request_id: str = "a", num_bytes: int = 0, **fields: Any) -> Request:
    """Return a request as the gateway keeps it."""
    client = Client((b"c",), JSON, Connection(), Share())
    return Request(GenerateRequest(**{"prompt": "p"} | fields), request_id, client, num_bytes)


def delta(begin: int, end: int, request_id: str = "a", **fields: Any) -> StreamDelta:
    """Return tokens `begin` to `end`, of one character each."""
    of_tokens = {"token_ids": list(range(begin, end)), "text": "x" * (end - begin), "attempt": 0}
    return StreamDelta(
        request_id=request_id, token_offset=begin, char_offset=begin, **of_tokens | fields
    )


Start = Callable[..., Harness]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def start_gateway(tmp_path: Path, context: Context) -> Start:
    """Start a gateway with options."""

    def start(**options: Any) -> Harness:
        config = Config(**{"endpoint": f"ipc://{tmp_path}/c"} | options)
        return Harness(context, tmp_path, config)

    return start


@pytest.fixture
def harness(start_gateway: Start) -> Harness:
    return start_gateway()


@pytest.fixture
def client(harness: Harness) -> Socket:
    return harness.connect()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Return a folder with the server's keys, and those of `client` and `alice`."""
    for name in (None, "alice"):
        make_keys(tmp_path / "keys", name)
    return tmp_path / "keys"
