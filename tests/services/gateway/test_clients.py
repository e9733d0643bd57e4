"""Output leaves at once, and a client that does not read slows nobody and loses nothing."""

import logging
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.protocol.client.session import PendingRequest, Session
from penstock.protocol.messages.client import (
    BATCH,
    MSGPACK,
    AbortReply,
    AbortRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    ReplyBatch,
    TextDelta,
    encode_number,
    split_reply,
)
from penstock.protocol.messages.pipeline import TextDeltas
from penstock.services.gateway import connections
from penstock.services.gateway.request import Connection
from penstock.services.gateway.requests import DEFECT
from tests.services.gateway.conftest import TIMEOUT, Harness, Socket, Start, delta

decode_batch = msgspec.msgpack.Decoder(ReplyBatch).decode


# ---- output that arrives at once: one piece a request, one message an HTTP server --------------


def number_of(name: str) -> bytes:
    return encode_number(1 + ord(name))


def submit(harness: Harness, socket: Socket, *names: str) -> None:
    """Send streams as our HTTP servers do, with a number before each."""
    for name in names:
        request = GenerateRequest(prompt=[1], request_id=name, stream=True)
        socket.send_multipart([number_of(name), MSGPACK.encode(request)])
    harness.run_until(lambda: all(map(harness.ledger.get, names)))


def step(harness: Harness, begin: int, *names: str, **fields: Any) -> None:
    """Send the message of one step: a token for each request."""
    attempts = {name: harness.get(name).attempt for name in names}
    deltas = [delta(begin, begin + 1, name, attempt=attempts[name], **fields) for name in names]
    harness.detokenizer.send(TextDeltas(deltas))


def test_an_http_server_gets_a_step_of_all_requests_in_one_message(harness: Harness) -> None:
    socket = harness.connect_inside()
    submit(harness, socket, "a", "b")
    for begin in range(3):
        step(harness, begin, "a", "b")
    step(harness, 3, "a", finish_reason="stop")
    answers: dict[bytes, list[Any]] = {number_of("a"): [], number_of("b"): []}
    first: list[bytes] = []
    while not any(isinstance(reply, GenerateReply) for reply in answers[number_of("a")]):
        number, frame = split_reply(harness.receive_frames(socket))
        assert number == BATCH
        batch = decode_batch(frame)
        first = first or batch.numbers
        for name, reply in zip(batch.numbers, batch.replies, strict=True):
            answers[name].append(reply)
    assert set(first) == set(answers)
    *pieces, reply = answers[number_of("a")]
    assert [token for piece in pieces for token in piece.token_ids] == reply.token_ids
    assert reply.token_ids == [0, 1, 2, 3]
    of_b = answers[number_of("b")]
    assert [token for piece in of_b for token in piece.token_ids] == [0, 1, 2]
    assert harness.ledger.find("a") is None


def test_steps_that_wait_are_one_piece_for_any_client(harness: Harness) -> None:
    """The gateway is busy while three steps arrive."""
    socket, results = harness.connect(), harness.model.results
    submit(harness, socket, "a")
    taken = list(results.receive_frames())
    for begin in range(3):
        step(harness, begin, "a")
        assert results.socket.poll(TIMEOUT)
        taken += results.receive_frames()
    results.receive_frames = lambda _: iter(taken)  # type: ignore[assignment]
    harness.gateway.on_results(harness.model)
    _, frame = split_reply(harness.receive_frames(socket))
    assert MSGPACK.decode_reply(frame).token_ids == [0, 1, 2]


def test_a_server_that_stands_still_gets_all_in_the_end(start_gateway: Start) -> None:
    harness = start_gateway(max_unread_bytes=1 << 12)
    socket = harness.connect_inside(RCVHWM=1, RCVBUF=1)
    names = [f"{index}" for index in range(8)]
    submit(harness, socket, *names)
    (connection,) = harness.connections
    last, begin = harness.get("7"), 0
    while len(connection.unsent) < len(names):
        step(harness, begin, *names)
        begin += 1
        harness.run_until(lambda: len(last.token_ids) == begin)  # noqa: B023
    step(harness, begin, *names, finish_reason="length")
    harness.run_until(lambda: not harness.ledger.num_open)
    session = Session()
    answers: dict[str, PendingRequest] = {}
    for name in names:
        answer = PendingRequest(
            number_of(name), GenerateRequest(prompt=[1], request_id=name, stream=True)
        )
        answers[name] = session._answers[answer.number] = answer
    while session.unanswered():
        while not socket.poll(10):
            harness.run_heartbeats(1)
        session.receive(socket.recv_multipart())
    for answer in answers.values():
        piece = answer.take_delta()
        assert piece
        assert piece.token_ids == list(range(begin + 1))
    assert not harness.ledger


def test_a_request_without_a_number_is_answered_alone(harness: Harness) -> None:
    socket = harness.connect_inside()
    harness.submit(socket, "a", stream=True)
    step(harness, 0, "a")
    assert harness.receive_reply(socket).token_ids == [0]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_can_not_be_encoded(harness: Harness, stream: bool, inside: bool) -> None:
    """That request fails; the others of the same HTTP server are answered."""
    client = harness.connect_inside() if inside else harness.connect()
    session = Session()
    requests = [GenerateRequest(prompt=[1], request_id=name, stream=stream) for name in "ab"]
    bad, good = answers = [session.ask(request) for request in requests]
    for answer in answers:
        client.send_multipart(answer.frames)
    harness.run_until(lambda: all(map(harness.ledger.get, "ab")))
    harness.get("a")._text.append("\ud800")
    step(harness, 0, "a", "b", finish_reason="length")
    while session.unanswered():
        session.receive(harness.receive_frames(client))
    assert bad.final == ErrorReply(code="failed", message=DEFECT, request_id="a")
    assert isinstance(good.final, GenerateReply)
    assert good.final.token_ids == [0]
    assert harness.is_empty()


@pytest.mark.parametrize("is_bad", [False, True])
def test_an_answer_that_waited_for_room_is_sent_once(harness: Harness, is_bad: bool) -> None:
    """An answer that can't be encoded when there is room fails alone."""
    client = harness.connect()
    harness.submit(client, "a", "b")
    for _ in "ab":
        harness.tokenize()
    (connection,) = harness.connections
    connection.unsent |= {"a": None, "b": None} if is_bad else {"b": None}  # as at a full queue
    if is_bad:
        harness.get("a")._text.append("\ud800")
    step(harness, 0, *("ba" if is_bad else "ab"), finish_reason="length")
    harness.run_until(lambda: not harness.ledger)
    harness.send(client, AbortRequest(request_id="end"))
    replies = [harness.receive_reply(client) for _ in range(3)]
    found = {reply.request_id: type(reply) for reply in replies}
    of_a = ErrorReply if is_bad else GenerateReply
    assert found == {"a": of_a, "b": GenerateReply, "end": AbortReply}
    assert harness.is_empty()


# ---- clients that do not read ------------------------------------------------------------------

SLOW = {"RCVHWM": 1, "RCVBUF": 1}
PIECE = 10_000  # tokens of one delta, of one character each: the system's buffers are soon full
NUM_HELD = 20  # deltas in a row that find no room: the system moves bytes on for a while


@pytest.fixture
def small(start_gateway: Start, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Return a gateway that keeps few answers of each client."""
    monkeypatch.setattr(connections, "MAX_SEND_QUEUE", 4)
    return start_gateway(endpoint="tcp://127.0.0.1:*", max_unread_bytes=1 << 20)


def fill(harness: Harness, request_id: str) -> Connection:
    """Generate until the client's queue is full and stays full: its connection."""
    request = harness.get(request_id)
    num_held = 0
    while num_held < NUM_HELD:
        num_unread = request.num_unread_bytes
        length = len(request.token_ids)
        harness.send_tokens(request_id, length, length + (1 if num_unread else PIECE))
        num_held = num_held + 1 if request.num_unread_bytes > num_unread > 0 else 0
    return request.client.connection


def filled(harness: Harness, slow: Socket) -> Connection:
    """Fill the queue of a client with a stream `a`."""
    harness.submit(slow, "a", stream=True)
    harness.tokenize()
    return fill(harness, "a")


def next_reply(harness: Harness, socket: Socket) -> object:
    """Return a reply that comes now, or after a heartbeat."""
    while not socket.poll(100):
        harness.run_heartbeats(1)
    return MSGPACK.decode_reply(socket.recv())


def test_what_was_not_read_comes_at_once(small: Harness) -> None:
    slow, quick = small.connect(**SLOW), small.connect()
    small.submit(quick, "quick", stream=True)
    small.tokenize()
    connection = filled(small, slow)
    for begin in range(20):
        small.send_tokens("quick", begin, begin + 1)
        assert small.receive_reply(quick).token_ids == [begin]
    small.send_tokens("quick", 20, 21, finish_reason="stop")
    assert [type(small.receive_reply(quick)) for _ in range(2)] == [TextDelta, GenerateReply]
    num_tokens = len(small.get("a").token_ids) + 1
    small.send_tokens("a", num_tokens - 1, num_tokens, finish_reason="stop")
    assert small.ledger.num_open == 0  # an answer that is not fetched keeps nobody out
    small.send(slow, AbortRequest(request_id="a"))
    small.run_until(lambda: connection.replies)
    deltas: list[TextDelta] = []
    while not isinstance(reply := next_reply(small, slow), GenerateReply):
        assert isinstance(reply, TextDelta)
        assert reply.token_offset == sum(len(delta.token_ids) for delta in deltas)
        deltas.append(reply)
    assert "".join(delta.text for delta in deltas) == reply.text == "x" * num_tokens
    assert len(deltas[-1].token_ids) >= NUM_HELD  # those that found no room
    assert isinstance(next_reply(small, slow), AbortReply)
    assert small.is_empty()


def test_who_leaves_too_much_unread_is_cut_off(
    small: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    slow, quick = small.connect(**SLOW), small.connect()
    small.submit(slow, "a", stream=True)
    small.submit(slow, "b")
    small.submit(quick, "quick", stream=True)
    for _ in range(3):
        small.tokenize()
    connection = fill(small, "a")
    assert len(small.ledger) == 3
    small.scheduler_messages()
    with caplog.at_level(logging.WARNING):
        while request := small.ledger.get("a"):
            num_tokens = len(request.token_ids)
            assert num_tokens < 10 << 20  # ten times the limit
            small.send_tokens("a", num_tokens, num_tokens + PIECE)
            small.run_heartbeats(1)
    assert {request_id for request_id, _ in small.releases()} == {"a", "b"}
    aborted, disconnected = caplog.messages
    assert aborted.endswith("bytes of answers unread: its 2 requests are aborted")
    assert disconnected.endswith("it does not read its answers (--max-unread-bytes)")
    small.run_until(lambda: connection not in list(small.connections))
    small.send_tokens("quick", 0, 1, finish_reason="stop")
    assert [type(small.receive_reply(quick)) for _ in range(2)] == [TextDelta, GenerateReply]
    assert small.is_empty()
    while len(small.connections) < 2:  # once it has read, libzmq connects again
        small.connections.handle_events()
        if slow.poll(10):
            assert isinstance(MSGPACK.decode_reply(slow.recv()), TextDelta)
    small.submit(slow, "again")
    small.tokenize()
    small.send_tokens("again", 0, 1, finish_reason="stop")
    assert small.receive_reply(slow).request_id == "again"


def test_our_http_servers_are_not_cut_off(small: Harness) -> None:
    """One that stands still for seconds has many clients, and drops those that do not read."""
    slow = small.connect_inside(**SLOW)
    filled(small, slow)
    request = small.get("a")
    for _ in range(4):
        begin = len(request.token_ids)
        small.send_tokens("a", begin, begin + small.model.config.max_unread_bytes // 4)
        small.run_heartbeats(1)
    assert small.get("a") is request
    assert not small.connections.num_cut_off


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/c"


def test_what_libzmq_has_queued_counts(start_gateway: Start, endpoint: str) -> None:
    limit = 1 << 20
    harness = start_gateway(endpoint=endpoint, max_unread_bytes=limit)
    slow = harness.connect(**SLOW)
    harness.submit(slow, "a", stream=True)
    harness.tokenize()
    num_tokens = 0
    while harness.ledger.get("a"):
        harness.send_tokens("a", num_tokens, num_tokens + PIECE)
        num_tokens += PIECE
        harness.run_heartbeats(1)
        assert num_tokens < 10 * limit  # of 4 bytes each
    harness.run_until(lambda: not len(harness.connections))


def test_who_reads_gets_more_than_the_limit(start_gateway: Start, endpoint: str) -> None:
    """A single answer may be longer than the limit, and many short ones are read meanwhile."""
    harness = start_gateway(endpoint=endpoint, max_unread_bytes=1 << 16)
    client = harness.connect()
    harness.submit(client, "stream", stream=True)
    harness.tokenize()
    for begin in range(0, 20 * PIECE, PIECE):
        harness.send_tokens("stream", begin, begin + PIECE)
        assert isinstance(next_reply(harness, client), TextDelta)
        harness.run_heartbeats(1)
    harness.submit(client, "large")
    harness.tokenize()
    harness.send_tokens("large", 0, 20 * PIECE, finish_reason="stop")
    harness.run_heartbeats(3)
    assert len(next_reply(harness, client).token_ids) == 20 * PIECE  # type: ignore[attr-defined]
    assert harness.get("stream")


def test_a_full_queue_is_no_client_that_is_gone(small: Harness) -> None:
    slow = small.connect(**SLOW)
    identity = filled(small, slow).identity
    channel, error = small.clients.channel, 0
    while not error:  # the system may have taken some more meanwhile
        error = channel.try_send([identity, bytes(PIECE)])
    assert error == zmq.EAGAIN
    assert channel.try_send([b"nobody", b""]) == zmq.EHOSTUNREACH
    small.leave(slow)
    small.run_heartbeats(2)
    assert small.is_empty()


def test_a_full_queue_is_not_tried_for_every_token(small: Harness) -> None:
    """Each try costs the encoding of all that waits."""
    slow = small.connect(**SLOW)
    connection, request = filled(small, slow), small.get("a")
    connection.retry_at = math.inf
    num_read = 0
    while num_read < request._delivered_tokens:
        num_read += len(small.receive_reply(slow).token_ids)
    num_tokens = len(request.token_ids)
    small.send_tokens("a", num_tokens, num_tokens + 1)
    assert request.num_unread_bytes
    connection.retry_at = 0.0
    small.send_tokens("a", num_tokens + 1, num_tokens + 2)
    assert not request.num_unread_bytes


def test_options_of_the_clients_socket(harness: Harness) -> None:
    """A queue of answers has a limit; a client has ten seconds to show its key."""
    get = harness.clients.channel.socket.getsockopt
    assert get(zmq.SNDHWM) == connections.MAX_SEND_QUEUE == 4096
    assert get(zmq.HANDSHAKE_IVL) == 10_000
