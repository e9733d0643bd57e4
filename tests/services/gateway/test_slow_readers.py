"""A client that does not read slows nobody, loses nothing, and is cut off in the end."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from penstock.protocol.messages.client import AbortReply, AbortRequest, GenerateReply, TextDelta
from penstock.protocol.messages.codec import MSGPACK
from penstock.services.gateway import client_socket
from penstock.services.gateway.connections import Connection
from tests.services.gateway.conftest import Stage

SLOW = {"RCVHWM": 1, "RCVBUF": 1}
PIECE = 10_000
"""tokens of one delta, of one character each: the system's buffers are soon full"""

NUM_HELD = 20
"""deltas in a row that find no room: the system moves bytes on for a while"""


@pytest.fixture
def one(stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(client_socket, "MAX_SEND_QUEUE", 4)
    return stage(endpoint="tcp://127.0.0.1:*", max_unread_bytes=1 << 20)


def fill(one: Stage, request_id: str) -> Connection:
    """Generate until the client's queue is full and stays full: its connection."""
    entry = one.gateway.ledger.get(request_id)
    assert entry
    num_held = 0
    while num_held < NUM_HELD:
        num_unread = entry.num_unread_bytes
        length = len(entry.token_ids)
        one.generate(request_id, length, length + (1 if num_unread else PIECE))
        num_held = num_held + 1 if entry.num_unread_bytes > num_unread > 0 else 0
    return entry.client.connection


def next_reply(one: Stage, socket: "zmq.Socket[bytes]") -> object:
    """Return a reply that comes now, or after a heartbeat."""
    while not socket.poll(100):
        one.heartbeats(1)
    return MSGPACK.decode_reply(socket.recv())


def test_what_was_not_read_comes_at_once(one: Stage) -> None:
    slow, quick = one.connect(**SLOW), one.connect()
    one.open(slow, "slow", stream=True)
    one.open(quick, "quick", stream=True)
    one.tokenize()
    one.tokenize()
    connection = fill(one, "slow")
    for begin in range(20):
        one.generate("quick", begin, begin + 1)
        assert one.hear(quick).token_ids == [begin]
    one.generate("quick", 20, 21, finish_reason="stop")
    assert [type(one.hear(quick)) for _ in range(2)] == [TextDelta, GenerateReply]
    entry = one.gateway.ledger.get("slow")
    assert entry
    num_tokens = len(entry.token_ids) + 1
    one.generate("slow", num_tokens - 1, num_tokens, finish_reason="stop")
    assert one.gateway.ledger.num_open == 0  # an answer that is not fetched keeps nobody out
    one.ask(slow, AbortRequest(request_id="slow"))
    one.work_until(lambda: connection.replies)
    deltas: list[TextDelta] = []
    while not isinstance(reply := next_reply(one, slow), GenerateReply):
        assert isinstance(reply, TextDelta)
        assert reply.token_offset == sum(len(delta.token_ids) for delta in deltas)
        deltas.append(reply)
    assert "".join(delta.text for delta in deltas) == reply.text == "x" * num_tokens
    assert len(deltas[-1].token_ids) >= NUM_HELD  # those that found no room
    assert isinstance(next_reply(one, slow), AbortReply)
    assert one.is_empty()


def test_who_leaves_too_much_unread_is_cut_off(
    one: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    slow, quick = one.connect(**SLOW), one.connect()
    one.open(slow, "a", stream=True)
    one.open(slow, "b")
    one.open(quick, "quick", stream=True)
    for _ in range(3):
        one.tokenize()
    connection = fill(one, "a")
    assert len(one.gateway.ledger) == 3
    one.told_scheduler()
    with caplog.at_level(logging.WARNING):
        while entry := one.gateway.ledger.get("a"):
            num_tokens = len(entry.token_ids)
            assert num_tokens < 10 << 20  # ten times the limit
            one.generate("a", num_tokens, num_tokens + PIECE)
            one.heartbeats(1)
    assert {m.request_id for m in one.told_scheduler()} == {"a", "b"}
    aborted, disconnected = caplog.messages
    assert aborted.endswith("bytes of answers unread: its 2 requests are aborted")
    assert disconnected.endswith("it does not read its answers (--max-unread-bytes)")
    one.work_until(lambda: connection not in list(one.gateway.connections))
    one.generate("quick", 0, 1, finish_reason="stop")
    assert isinstance(one.hear(quick), TextDelta)
    assert isinstance(one.hear(quick), GenerateReply)
    assert one.is_empty()
    while len(one.gateway.connections) < 2:  # once it has read, libzmq connects again
        one.gateway.connections.handle_events()
        if slow.poll(10):
            assert isinstance(MSGPACK.decode_reply(slow.recv()), TextDelta)
    one.open(slow, "again")
    one.tokenize()
    one.generate("again", 0, 1, finish_reason="stop")
    assert one.hear(slow).request_id == "again"


@pytest.mark.parametrize("where", ["tcp", "ipc"])
def test_what_libzmq_has_queued_counts(
    stage: Callable[..., Stage], tmp_path: Path, where: str
) -> None:
    limit = 1 << 20
    endpoint = "tcp://127.0.0.1:*" if where == "tcp" else f"ipc://{tmp_path}/c"
    one = stage(endpoint=endpoint, max_unread_bytes=limit)
    slow = one.connect(**SLOW)
    one.open(slow, "a", stream=True)
    one.tokenize()
    num_tokens = 0
    while one.gateway.ledger.get("a"):
        one.generate("a", num_tokens, num_tokens + PIECE)
        num_tokens += PIECE
        one.heartbeats(1)
        assert num_tokens < 10 * limit  # of 4 bytes each
    one.work_until(lambda: not len(one.gateway.connections))


@pytest.mark.parametrize("where", ["tcp", "ipc"])
def test_who_reads_gets_more_than_the_limit(
    stage: Callable[..., Stage], tmp_path: Path, where: str
) -> None:
    """A single answer may be longer than the limit, and many short ones are read meanwhile."""
    endpoint = "tcp://127.0.0.1:*" if where == "tcp" else f"ipc://{tmp_path}/c"
    one = stage(endpoint=endpoint, max_unread_bytes=1 << 16)
    client = one.connect()
    one.open(client, "stream", stream=True)
    one.tokenize()
    for begin in range(0, 20 * PIECE, PIECE):
        one.generate("stream", begin, begin + PIECE)
        assert isinstance(next_reply(one, client), TextDelta)
        one.heartbeats(1)
    one.open(client, "large")
    one.tokenize()
    one.generate("large", 0, 20 * PIECE, finish_reason="stop")
    one.heartbeats(3)
    assert len(next_reply(one, client).token_ids) == 20 * PIECE  # type: ignore[attr-defined]
    assert one.gateway.ledger.get("stream")


def test_a_full_queue_is_no_client_that_is_gone(one: Stage) -> None:
    slow = one.connect(**SLOW)
    one.open(slow, "a", stream=True)
    one.tokenize()
    fill(one, "a")
    identity = one.gateway.ledger.get("a").client.envelope[0]  # type: ignore[union-attr]
    error = 0
    while not error:  # the system may have taken some more meanwhile
        error = one.gateway.clients.channel.try_send([identity, bytes(PIECE)])
    assert error == zmq.EAGAIN
    assert one.gateway.clients.channel.try_send([b"nobody", b""]) == zmq.EHOSTUNREACH
    slow.close()
    one.work_until(lambda: not len(one.gateway.connections))
    one.heartbeats(2)
    assert one.is_empty()


def test_a_full_queue_is_not_tried_for_every_token(one: Stage) -> None:
    """Each try costs the encoding of all that waits."""
    slow = one.connect(**SLOW)
    one.open(slow, "a", stream=True)
    one.tokenize()
    connection = fill(one, "a")
    entry = one.gateway.ledger.get("a")
    assert entry
    connection.retry_at = math.inf
    while slow.poll(200):
        slow.recv()
    num_tokens = len(entry.token_ids)
    one.generate("a", num_tokens, num_tokens + 1)
    assert entry.num_unread_bytes
    connection.retry_at = 0.0
    one.generate("a", num_tokens + 1, num_tokens + 2)
    assert not entry.num_unread_bytes


def test_the_queue_of_a_client_has_a_limit(stage: Callable[..., Stage]) -> None:
    assert (
        stage().gateway.clients.channel.socket.getsockopt(zmq.SNDHWM)
        == client_socket.MAX_SEND_QUEUE
        == 4096
    )
