"""Output that arrives at once leaves at once: one piece a request, one message an HTTP server."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from penstock.protocol.client.session import Answer, Session
from penstock.protocol.messages.client import (
    BATCH,
    MSGPACK,
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
from penstock.services.gateway.failures import DEFECT
from tests.services.gateway.conftest import GatewayHarness

Start = Callable[..., GatewayHarness]
decode_batch = msgspec.msgpack.Decoder(ReplyBatch).decode


def number_of(name: str) -> bytes:
    return encode_number(1 + ord(name))


def submit(harness: GatewayHarness, socket: "zmq.Socket[bytes]", *names: str) -> None:
    """Send streams as our HTTP servers do, with a number before each."""
    for name in names:
        request = GenerateRequest(prompt=[1], request_id=name, stream=True)
        socket.send_multipart([number_of(name), MSGPACK.encode(request)])
    harness.run_until(lambda: all(map(harness.gateway.ledger.get, names)))


def step(harness: GatewayHarness, begin: int, *names: str, **fields: Any) -> None:
    """Send the message of one step: a token for each request."""
    deltas = []
    for name in names:
        entry = harness.gateway.ledger.get(name)
        assert entry
        deltas.append(
            TextDelta(
                request_id=name,
                token_offset=begin,
                char_offset=begin,
                token_ids=[begin],
                text="x",
                attempt=entry.attempt,
                **fields,
            )
        )
    harness.detokenizer.send(TextDeltas(deltas))


def test_an_http_server_gets_a_step_of_all_requests_in_one_message(start_gateway: Start) -> None:
    harness = start_gateway()
    socket = harness.connect_inside()
    submit(harness, socket, "a", "b")
    for begin in range(3):
        step(harness, begin, "a", "b")
    step(harness, 3, "a", finish_reason="stop")
    answers: dict[bytes, list[Any]] = {number_of("a"): [], number_of("b"): []}
    first: list[bytes] = []
    while not any(isinstance(one, GenerateReply) for one in answers[number_of("a")]):
        [data] = harness.receive_frames(socket)
        number, frame = split_reply([data])
        assert number == BATCH
        batch = decode_batch(frame)
        first = first or batch.numbers
        for name, reply in zip(batch.numbers, batch.replies, strict=True):
            answers[name].append(reply)
    assert set(first) == set(answers)
    *pieces, reply = answers[number_of("a")]
    assert [token for one in pieces for token in one.token_ids] == reply.token_ids == [0, 1, 2, 3]
    assert [token for one in answers[number_of("b")] for token in one.token_ids] == [0, 1, 2]
    assert harness.gateway.ledger.find("a") is None


def test_steps_that_wait_are_one_piece_for_any_client(start_gateway: Start) -> None:
    """The gateway is busy while three steps arrive."""
    harness = start_gateway()
    socket = harness.connect()
    submit(harness, socket, "a")
    results = harness.gateway.default.results
    taken = list(results.receive_frames())
    for begin in range(3):
        step(harness, begin, "a")
        assert results.socket.poll(60_000)
        taken += results.receive_frames()
    results.receive_frames = lambda _: iter(taken)  # type: ignore[method-assign]
    harness.gateway.on_results(harness.gateway.default)
    _, frame = split_reply(harness.receive_frames(socket))
    assert MSGPACK.decode_reply(frame).token_ids == [0, 1, 2]


def test_a_server_that_stands_still_gets_all_in_the_end(start_gateway: Start) -> None:
    harness = start_gateway(max_unread_bytes=1 << 12)
    socket = harness.connect_inside(RCVHWM=1, RCVBUF=1)
    names = [f"{index}" for index in range(8)]
    submit(harness, socket, *names)
    connection = next(iter(harness.gateway.connections))
    begin = 0
    while len(connection.unsent) < len(names):
        step(harness, begin, *names)
        begin += 1
        harness.run_until(lambda: len(harness.gateway.ledger.get("7").token_ids) == begin)  # type: ignore[union-attr]  # noqa: B023
    step(harness, begin, *names, finish_reason="length")
    harness.run_until(lambda: not harness.gateway.ledger.num_open)
    session = Session()
    answers: dict[str, Answer] = {}
    for name in names:
        answer = Answer(number_of(name), GenerateRequest(prompt=[1], request_id=name, stream=True))
        answers[name] = session._answers[answer.number] = answer
    while session.unanswered():
        while not socket.poll(10):
            harness.gateway.on_heartbeat()
        session.receive(socket.recv_multipart())
    for answer in answers.values():
        piece = answer.take_delta()
        assert piece
        assert piece.token_ids == list(range(begin + 1))
    assert not harness.gateway.ledger


def test_a_server_that_left_keeps_nothing_open(start_gateway: Start) -> None:
    harness = start_gateway()
    socket = harness.connect_inside()
    submit(harness, socket, "a", "b")
    socket.close(linger=0)
    harness.run_until(lambda: not len(harness.gateway.connections))
    step(harness, 0, "a", "b")
    for _ in range(3):
        harness.gateway.on_heartbeat()
    harness.run_until(lambda: not harness.gateway.ledger)


def test_a_request_without_a_number_is_answered_alone(start_gateway: Start) -> None:
    harness = start_gateway()
    socket = harness.connect_inside()
    harness.submit(socket, "a", stream=True)
    step(harness, 0, "a")
    assert harness.receive_reply(socket).token_ids == [0]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_can_not_be_encoded(
    start_gateway: Start, stream: bool, inside: bool
) -> None:
    """That request fails; the others of the same HTTP server are answered."""
    harness = start_gateway()
    client = harness.connect_inside() if inside else harness.connect()
    session = Session()
    requests = [GenerateRequest(prompt=[1], request_id=name, stream=stream) for name in "ab"]
    bad, good = answers = [session.ask(request) for request in requests]
    for answer in answers:
        client.send_multipart(answer.frames)
    harness.run_until(lambda: all(map(harness.gateway.ledger.get, "ab")))
    entry = harness.gateway.ledger.get("a")
    assert entry
    entry._text.append("\ud800")
    step(harness, 0, "a", "b", finish_reason="length")
    while session.unanswered():
        session.receive(harness.receive_frames(client))
    assert bad.final == ErrorReply(code="failed", message=DEFECT, request_id="a")
    assert isinstance(good.final, GenerateReply)
    assert good.final.token_ids == [0]
    assert harness.is_empty()


def test_an_answer_that_can_not_be_encoded_when_there_is_room(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", "b")
    for _ in "ab":
        harness.tokenize()
    entry = harness.gateway.ledger.get("a")
    assert entry
    entry._text.append("\ud800")
    (connection,) = harness.gateway.connections
    connection.unsent |= {"a": None, "b": None}  # as if its queue had been full at earlier deltas
    step(harness, 0, "b", "a", finish_reason="length")
    replies = [harness.receive_reply(client) for _ in "ab"]
    assert {one.request_id: type(one) for one in replies} == {"a": ErrorReply, "b": GenerateReply}
    assert harness.is_empty()


def test_an_answer_that_waited_for_room_is_sent_once(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", "b")
    for _ in "ab":
        harness.tokenize()
    (connection,) = harness.gateway.connections
    connection.unsent["b"] = None  # as if its queue had been full at an earlier delta
    step(harness, 0, "a", "b", finish_reason="length")
    harness.run_until(lambda: not harness.gateway.ledger)
    harness.send(client, AbortRequest(request_id="end"))
    replies = [harness.receive_reply(client) for _ in range(3)]
    assert [one.request_id for one in replies] == ["b", "a", "end"]
