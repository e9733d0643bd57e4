"""Mutated frames to the sockets of a running pipeline: nobody dies, others are answered right.

`PENSTOCK_SEARCH=50 pytest --timeout 3000 tests/fuzz/test_pipeline.py` sends 50,000.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from penstock.protocol.config import Config
from penstock.protocol.messages.client import JSON, MSGPACK, GenerateRequest, codec_of
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import GatewayStarted, TokenizedRequest
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.protocol.transport.context import Context, endpoints
from penstock.services.gateway.clients import MAX_ENVELOPE_BYTES
from tests.fuzz.frames import INNER_ID, UNIONS, encoded
from tests.fuzz.mutator import Mutator
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture
from tests.search import scaled

pytestmark = pytest.mark.pipeline
NUM_FRAMES = scaled(1_000)
NUM_CONNECTIONS = 4
FRAMES_A_ROUND = 100
"""less than what admission calls overloaded"""
ANSWER_TIMEOUT_MS = 60_000
INNER_SOCKETS = {
    "tokenizers": (zmq.DEALER, "FromTokenizer"),
    "requests": (zmq.PUSH, "ToScheduler"),
    "workers": (zmq.DEALER, "FromWorker"),
    "detokenizers": (zmq.DEALER, "FromDetokenizer"),
    "results": (zmq.PUSH, "ToGateway"),
    "supervisor": (zmq.PUSH, "ToSupervisor"),
}
"""what connects to each, and what it says"""


@pytest.fixture(scope="module")
def served(pipeline: Callable[..., Pipeline]) -> Pipeline:  # noqa: F811
    """With a short context: a mutated request may want as many tokens as fit."""
    return pipeline("--max-model-len", "32", "--detokenizers", "2")


@pytest.fixture(autouse=True)
def nothing_is_left(served: Pipeline) -> Iterator[None]:
    """No process has died, no request is open, every block is free."""
    before = served.processes()
    yield
    with served.client() as client:
        status = client.status(fresh=True)
        while status.num_requests or not is_idle(status.scheduler):
            status = client.status(fresh=True)
    assert served.processes() == before
    assert set(served.restarts().values()) == {0}


def is_idle(scheduler: SchedulerStatus | None) -> bool:
    """Return the scheduler's reports come twice a second, so the last one may be of before."""
    if scheduler is None or scheduler.num_running or scheduler.num_waiting:
        return False
    return scheduler.num_free_blocks == scheduler.num_blocks > 0


def connections(context: Context, kind: int, where: str) -> "list[zmq.Socket[bytes]]":
    """Connect foreign sockets; their messages are delivered though they are closed."""
    sockets = [context.socket(kind) for _ in range(NUM_CONNECTIONS)]
    for socket in sockets:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(where)
    return sockets


def answer_to(socket: "zmq.Socket[bytes]", number: bytes) -> Any:
    """Return the answer to the request after frame `number`; drop answers to mutated frames."""
    while True:
        assert socket.poll(ANSWER_TIMEOUT_MS), number
        *envelope, frame = socket.recv_multipart()
        if envelope == [number]:
            return codec_of(frame).decode_reply(frame)


@pytest.mark.search
def test_clients(served: Pipeline) -> None:
    """Each connection sends mutated frames and then a question, whose answer must be right."""
    frames = Mutator("clients", encoded("Request")).frames(NUM_FRAMES)
    rng = Random("clients")
    with Context() as context:
        sockets = connections(context, zmq.DEALER, served.endpoint)
        for turn in range(NUM_FRAMES // FRAMES_A_ROUND):
            number = b"question %d" % turn
            for frame in islice(frames, FRAMES_A_ROUND):
                envelope = rng.choice(([], [b""], [b"1"], [frame[: MAX_ENVELOPE_BYTES // 2], b""]))
                rng.choice(sockets).send_multipart([*envelope, frame])
            asked = []
            for socket in sockets:
                a, b = rng.randrange(100), rng.randrange(100)
                question = GenerateRequest(prompt=f"{a}+{b}=", temperature=0)
                codec = rng.choice((JSON, MSGPACK))
                socket.send_multipart([number, codec.encode(question)])
                asked.append((socket, str(a + b)))
            for socket, answer in asked:
                assert answer_to(socket, number).text == answer
        for socket in sockets:
            socket.close(linger=0)


def is_forged(frame: bytes, union: str) -> bool:
    """Return whether a scheduler or gateway seems to have started, which its peer must believe.

    Whoever may write into the run folder (of mode 0700) can stop the pipeline. The examples are of
    epoch and attempt 0, long past.
    """
    try:
        message = msgspec.msgpack.decode(frame, type=UNIONS[union])
    except DECODE_ERRORS:
        return False
    match message:
        case SchedulerStatus(epoch=number) | GatewayStarted(first_attempt=number):
            return bool(number > 0)
    return False


@pytest.mark.search
@pytest.mark.parametrize("name", INNER_SOCKETS)
def test_inner_sockets(served: Pipeline, name: str) -> None:
    """Send from connections that come and go.

    A mutated heartbeat may register such a connection, which then does no work: its work goes to
    others when it is closed.
    """
    at = endpoints(Config(name=served.name, endpoint=served.endpoint))
    kind, union = INNER_SOCKETS[name]
    number = NUM_FRAMES // len(INNER_SOCKETS)
    frames = (f for f in Mutator(name, encoded(union)).frames(number) if not is_forged(f, union))
    rng = Random(name)
    with served.client() as client:
        while some := list(islice(frames, FRAMES_A_ROUND)):
            with Context() as context:
                sockets = connections(context, kind, getattr(at, name))
                for frame in some:
                    rng.choice(sockets).send(frame)
                for socket in sockets:
                    socket.close(linger=ANSWER_TIMEOUT_MS)
            streams = [client.submit(f"{a}+25=", temperature=0) for a in range(4)]
            assert [int(stream.result().text) for stream in streams] == [25, 26, 27, 28]


@pytest.mark.parametrize("token_id", [-1, 264, 2**31 - 1])
def test_token_ids_that_no_model_has(served: Pipeline, token_id: int) -> None:
    """They would end every worker that is given them, and each that is started afresh."""
    at = endpoints(Config(name=served.name, endpoint=served.endpoint))
    with Context() as context, served.client() as client:
        channel = context.connect(zmq.PUSH, at.requests)
        for prompt, output in (([1, token_id], []), ([1], [token_id, 2])):
            request = TokenizedRequest(
                f"{INNER_ID}{token_id}{prompt}", 0, SamplingParams(), pack(prompt), pack(output)
            )
            channel.send(request)
        channel.socket.close(linger=ANSWER_TIMEOUT_MS)
        assert client.generate("17+25=").text == "42"
