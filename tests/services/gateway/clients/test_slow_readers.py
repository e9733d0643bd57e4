"""A client that does not read slows nobody, loses nothing, and is cut off in the end."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from penstock.protocol.messages.client import (
    MSGPACK,
    AbortReply,
    AbortRequest,
    GenerateReply,
    TextDelta,
)
from penstock.services.gateway import connections
from penstock.services.gateway.request import Connection
from tests.services.gateway.conftest import GatewayHarness

SLOW = {"RCVHWM": 1, "RCVBUF": 1}
PIECE = 10_000
"""tokens of one delta, of one character each: the system's buffers are soon full"""

NUM_HELD = 20
"""deltas in a row that find no room: the system moves bytes on for a while"""


@pytest.fixture
def harness(
    start_gateway: Callable[..., GatewayHarness], monkeypatch: pytest.MonkeyPatch
) -> GatewayHarness:
    monkeypatch.setattr(connections, "MAX_SEND_QUEUE", 4)
    return start_gateway(endpoint="tcp://127.0.0.1:*", max_unread_bytes=1 << 20)


def fill(harness: GatewayHarness, request_id: str) -> Connection:
    """Generate until the client's queue is full and stays full: its connection."""
    entry = harness.gateway.ledger.get(request_id)
    assert entry
    num_held = 0
    while num_held < NUM_HELD:
        num_unread = entry.num_unread_bytes
        length = len(entry.token_ids)
        harness.send_tokens(request_id, length, length + (1 if num_unread else PIECE))
        num_held = num_held + 1 if entry.num_unread_bytes > num_unread > 0 else 0
    return entry.client.connection


def next_reply(harness: GatewayHarness, socket: "zmq.Socket[bytes]") -> object:
    """Return a reply that comes now, or after a heartbeat."""
    while not socket.poll(100):
        harness.run_heartbeats(1)
    return MSGPACK.decode_reply(socket.recv())


def test_what_was_not_read_comes_at_once(harness: GatewayHarness) -> None:
    slow, quick = harness.connect(**SLOW), harness.connect()
    harness.submit(slow, "slow", stream=True)
    harness.submit(quick, "quick", stream=True)
    harness.tokenize()
    harness.tokenize()
    connection = fill(harness, "slow")
    for begin in range(20):
        harness.send_tokens("quick", begin, begin + 1)
        assert harness.receive_reply(quick).token_ids == [begin]
    harness.send_tokens("quick", 20, 21, finish_reason="stop")
    assert [type(harness.receive_reply(quick)) for _ in range(2)] == [TextDelta, GenerateReply]
    entry = harness.gateway.ledger.get("slow")
    assert entry
    num_tokens = len(entry.token_ids) + 1
    harness.send_tokens("slow", num_tokens - 1, num_tokens, finish_reason="stop")
    assert harness.gateway.ledger.num_open == 0  # an answer that is not fetched keeps nobody out
    harness.send(slow, AbortRequest(request_id="slow"))
    harness.run_until(lambda: connection.replies)
    deltas: list[TextDelta] = []
    while not isinstance(reply := next_reply(harness, slow), GenerateReply):
        assert isinstance(reply, TextDelta)
        assert reply.token_offset == sum(len(delta.token_ids) for delta in deltas)
        deltas.append(reply)
    assert "".join(delta.text for delta in deltas) == reply.text == "x" * num_tokens
    assert len(deltas[-1].token_ids) >= NUM_HELD  # those that found no room
    assert isinstance(next_reply(harness, slow), AbortReply)
    assert harness.is_empty()


def test_who_leaves_too_much_unread_is_cut_off(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    slow, quick = harness.connect(**SLOW), harness.connect()
    harness.submit(slow, "a", stream=True)
    harness.submit(slow, "b")
    harness.submit(quick, "quick", stream=True)
    for _ in range(3):
        harness.tokenize()
    connection = fill(harness, "a")
    assert len(harness.gateway.ledger) == 3
    harness.scheduler_messages()
    with caplog.at_level(logging.WARNING):
        while entry := harness.gateway.ledger.get("a"):
            num_tokens = len(entry.token_ids)
            assert num_tokens < 10 << 20  # ten times the limit
            harness.send_tokens("a", num_tokens, num_tokens + PIECE)
            harness.run_heartbeats(1)
    assert {m.request_id for m in harness.scheduler_messages()} == {"a", "b"}
    aborted, disconnected = caplog.messages
    assert aborted.endswith("bytes of answers unread: its 2 requests are aborted")
    assert disconnected.endswith("it does not read its answers (--max-unread-bytes)")
    harness.run_until(lambda: connection not in list(harness.gateway.connections))
    harness.send_tokens("quick", 0, 1, finish_reason="stop")
    assert isinstance(harness.receive_reply(quick), TextDelta)
    assert isinstance(harness.receive_reply(quick), GenerateReply)
    assert harness.is_empty()
    while len(harness.gateway.connections) < 2:  # once it has read, libzmq connects again
        harness.gateway.connections.handle_events()
        if slow.poll(10):
            assert isinstance(MSGPACK.decode_reply(slow.recv()), TextDelta)
    harness.submit(slow, "again")
    harness.tokenize()
    harness.send_tokens("again", 0, 1, finish_reason="stop")
    assert harness.receive_reply(slow).request_id == "again"


def test_our_http_servers_are_not_cut_off(harness: GatewayHarness) -> None:
    """One that stands still for seconds has many clients, and drops those that do not read."""
    slow = harness.connect_inside(**SLOW)
    harness.submit(slow, "a", stream=True)
    harness.tokenize()
    fill(harness, "a")
    entry = harness.gateway.ledger.get("a")
    assert entry
    for _ in range(4):
        begin = len(entry.token_ids)
        harness.send_tokens(
            "a", begin, begin + harness.gateway.default.config.max_unread_bytes // 4
        )
        harness.run_heartbeats(1)
    assert harness.gateway.ledger.get("a") is entry
    assert not harness.gateway.connections.num_cut_off


@pytest.mark.parametrize("where", ["tcp", "ipc"])
def test_what_libzmq_has_queued_counts(
    start_gateway: Callable[..., GatewayHarness], tmp_path: Path, where: str
) -> None:
    limit = 1 << 20
    endpoint = "tcp://127.0.0.1:*" if where == "tcp" else f"ipc://{tmp_path}/c"
    harness = start_gateway(endpoint=endpoint, max_unread_bytes=limit)
    slow = harness.connect(**SLOW)
    harness.submit(slow, "a", stream=True)
    harness.tokenize()
    num_tokens = 0
    while harness.gateway.ledger.get("a"):
        harness.send_tokens("a", num_tokens, num_tokens + PIECE)
        num_tokens += PIECE
        harness.run_heartbeats(1)
        assert num_tokens < 10 * limit  # of 4 bytes each
    harness.run_until(lambda: not len(harness.gateway.connections))


@pytest.mark.parametrize("where", ["tcp", "ipc"])
def test_who_reads_gets_more_than_the_limit(
    start_gateway: Callable[..., GatewayHarness], tmp_path: Path, where: str
) -> None:
    """A single answer may be longer than the limit, and many short ones are read meanwhile."""
    endpoint = "tcp://127.0.0.1:*" if where == "tcp" else f"ipc://{tmp_path}/c"
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
    assert harness.gateway.ledger.get("stream")


def test_a_full_queue_is_no_client_that_is_gone(harness: GatewayHarness) -> None:
    slow = harness.connect(**SLOW)
    harness.submit(slow, "a", stream=True)
    harness.tokenize()
    fill(harness, "a")
    identity = harness.gateway.ledger.get("a").client.envelope[0]  # type: ignore[union-attr]
    error = 0
    while not error:  # the system may have taken some more meanwhile
        error = harness.gateway.clients.channel.try_send([identity, bytes(PIECE)])
    assert error == zmq.EAGAIN
    assert harness.gateway.clients.channel.try_send([b"nobody", b""]) == zmq.EHOSTUNREACH
    slow.close()
    harness.run_until(lambda: not len(harness.gateway.connections))
    harness.run_heartbeats(2)
    assert harness.is_empty()


def test_a_full_queue_is_not_tried_for_every_token(harness: GatewayHarness) -> None:
    """Each try costs the encoding of all that waits."""
    slow = harness.connect(**SLOW)
    harness.submit(slow, "a", stream=True)
    harness.tokenize()
    connection = fill(harness, "a")
    entry = harness.gateway.ledger.get("a")
    assert entry
    connection.retry_at = math.inf
    num_read = 0
    while num_read < entry._delivered_tokens:
        num_read += len(harness.receive_reply(slow).token_ids)
    num_tokens = len(entry.token_ids)
    harness.send_tokens("a", num_tokens, num_tokens + 1)
    assert entry.num_unread_bytes
    connection.retry_at = 0.0
    harness.send_tokens("a", num_tokens + 1, num_tokens + 2)
    assert not entry.num_unread_bytes


def test_the_queue_of_a_client_has_a_limit(start_gateway: Callable[..., GatewayHarness]) -> None:
    assert (
        start_gateway().gateway.clients.channel.socket.getsockopt(zmq.SNDHWM)
        == connections.MAX_SEND_QUEUE
        == 4096
    )
