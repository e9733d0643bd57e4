"""Clients that disconnect, come back and resubmit; with real sockets."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.messages.client import MSGPACK, ErrorReply, GenerateReply, TextDelta
from penstock.protocol.messages.pipeline import GatewayStarted, ReleaseRequest
from penstock.protocol.transport.process import first_number
from penstock.services.gateway.connections import Connections
from penstock.services.gateway.request import Client, Connection
from tests.services.gateway.conftest import TIMEOUT, GatewayHarness, request

Start = Callable[..., GatewayHarness]


def leave(harness: GatewayHarness, client: "zmq.Socket[bytes]") -> None:
    """Run the gateway until it hears that a connection is closed."""
    before = len(harness.gateway.connections)
    client.close()
    harness.run_until(lambda: len(harness.gateway.connections) < before)


@pytest.mark.parametrize("where", ["tcp", "ipc", "curve"])
def test_requests_of_a_client_that_is_gone_end(
    start_gateway: Start, tmp_path: Path, where: str
) -> None:
    keys = tmp_path / "keys" if where == "curve" else None
    if keys:
        make_keys(keys, None)
    endpoint = f"ipc://{tmp_path}/c" if where == "ipc" else "tcp://127.0.0.1:*"
    harness = start_gateway(endpoint=endpoint, curve_keys=str(keys or ""))
    gone, stays = harness.connect(keys), harness.connect(keys)
    harness.submit(gone, "a")
    harness.submit(gone, "b", stream=True)
    harness.submit(stays, "c")
    leave(harness, gone)
    harness.run_heartbeats(1)
    assert len(harness.gateway.ledger) == 3
    harness.run_heartbeats(1)
    assert [harness.gateway.ledger.get(name) is None for name in "abc"] == [True, True, False]
    released = [m.request_id for m in harness.scheduler_messages() if isinstance(m, ReleaseRequest)]
    assert sorted(released) == ["a", "b"]


def test_a_client_that_comes_back_goes_on(start_gateway: Start) -> None:
    harness = start_gateway()
    first = harness.connect()
    harness.submit(first, "a", stream=True)
    harness.tokenize()
    harness.send_tokens("a", 0, 3)
    leave(harness, first)
    harness.run_heartbeats(1)
    second = harness.connect()
    harness.send(second, request("a", stream=True))
    assert harness.receive_reply(second).token_ids == [0, 1, 2]
    harness.run_heartbeats(3)
    harness.send_tokens("a", 3, 5, finish_reason="stop")
    assert harness.receive_reply(second).token_offset == 3
    assert harness.receive_reply(second).token_ids == [0, 1, 2, 3, 4]
    assert harness.is_empty()


def test_an_answer_waits_for_a_client_that_comes_back(start_gateway: Start) -> None:
    harness = start_gateway()
    first = harness.connect()
    harness.submit(first, "a")
    harness.tokenize()
    leave(harness, first)
    harness.send_tokens("a", 0, 3, finish_reason="stop")
    second = harness.connect()
    harness.send(second, request("a"))
    assert harness.receive_reply(second).token_ids == [0, 1, 2]
    assert harness.is_empty()
    assert not harness.tokenizer.socket.poll(0)


def test_events_count_before_the_request_that_is_read_behind_them(start_gateway: Start) -> None:
    """The gateway has the request of a new connection in hand.

    It has heard of the end of neither the connection before nor of this one.
    """
    harness = start_gateway()
    first = harness.connect()
    harness.submit(first, "a")
    first.close()
    assert harness.gateway.connections.monitor.socket.poll(TIMEOUT)
    second = harness.connect()
    harness.send(second, request("b"))
    assert harness.gateway.clients.channel.socket.poll(TIMEOUT)
    harness.gateway.on_clients()
    harness.run_heartbeats(2)
    assert [harness.gateway.ledger.get(name) is None for name in "ab"] == [True, False]


def test_a_descriptor_that_is_used_again() -> None:
    connections = Connections(None)  # type: ignore[arg-type]
    clients = []
    for name in "ab":
        connections.open(5)
        one = connections.sender(5, name.encode())
        clients.append(Client((b"c",), MSGPACK, one, one.share))
        if name == "a":
            connections.close(5)
    assert [client.connection.is_closed for client in clients] == [True, False]


LEFT, NEXT = b"\0\0\0\0\1", b"\0\0\0\0\2"


@pytest.mark.parametrize("num_read", [0, 1])
@pytest.mark.parametrize("left", [LEFT, b"chosen"])
def test_waiting_messages_of_a_closed_connection(num_read: int, left: bytes) -> None:
    """The next connection has the same descriptor, and its messages come between the old ones."""
    connections = Connections(None)  # type: ignore[arg-type]
    connections.open(5)
    for _ in range(num_read):
        assert not connections.sender(5, left).is_closed
    connections.close(5)
    connections.open(5)
    connections.sender(5, left)  # not known as such, if it is the first
    client = connections.sender(5, NEXT)
    assert not client.is_closed
    for _ in range(2):
        assert connections.sender(5, left).is_closed
        assert connections.sender(5, NEXT) is client
    assert (len(connections), client.is_closed) == (1, False)


def test_a_client_comes_back_with_the_identity_that_it_has_chosen() -> None:
    connections = Connections(None)  # type: ignore[arg-type]
    for _ in range(3):
        connections.open(5)
        assert not connections.sender(5, b"chosen").is_closed
        connections.close(5)
    assert connections.sender(5, b"chosen").is_closed


CLIENT = """
import sys, zmq
from penstock.protocol.messages.client import TokenizePromptRequest
from penstock.protocol.messages.codec import MSGPACK
with zmq.Context() as context, context.socket(zmq.DEALER) as client:
    client.connect(sys.argv[1])
    for _ in range(int(sys.argv[2])):
        client.send(MSGPACK.encode(TokenizePromptRequest(prompt=sys.argv[3])))
    sys.stdin.read()
"""


@contextmanager
def client_process(harness: GatewayHarness, num_queries: int, prompt: str) -> Iterator[Connection]:
    """Send queries from a process of its own, which takes none of this process's descriptors."""
    command = [sys.executable, "-P", "-c", CLIENT, harness.endpoint, str(num_queries), prompt]
    connections = harness.gateway.connections

    def wait_for_connections(number: int) -> None:
        while len(connections) != number:
            assert connections.monitor.socket.poll(TIMEOUT)
            connections.handle_events()

    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        wait_for_connections(1)
        (connection,) = connections
        yield connection
        process.communicate()
    wait_for_connections(0)


@pytest.mark.parametrize("num_read", [0, 1])
def test_a_client_does_not_pay_for_the_one_before(start_gateway: Start, num_read: int) -> None:
    """Reuse the descriptor of a client that closed its connection with many messages unread."""
    harness = start_gateway(endpoint="tcp://127.0.0.1:*", max_waiting_tokens=1000)
    queries = harness.gateway.default.queries
    is_reused = False
    while not is_reused:
        receive = harness.gateway.clients.receive()
        with client_process(harness, 6, "word " * 300) as hostile:
            for _ in range(num_read):
                assert harness.gateway.clients.channel.socket.poll(TIMEOUT)
                assert next(receive)[0].connection is hostile
        with client_process(harness, 1, "mine") as connection:
            harness.run_until(lambda: 1 in [query.num_tokens for query in queries._open.values()])
            harness.run_heartbeats(1)
            (query,) = queries._open.values()
            assert not query.client.connection.is_closed
            assert query.share.num_waiting_tokens == 1
            is_reused = connection.fd == hostile.fd
        harness.run_heartbeats(1)
        assert not len(queries)


def test_a_request_that_is_read_when_its_client_has_gone(start_gateway: Start) -> None:
    harness = start_gateway()
    gone = harness.connect()
    harness.send(gone, request("a"))
    assert harness.gateway.clients.channel.socket.poll(TIMEOUT)
    harness.gateway.connections.handle_events()
    assert len(harness.gateway.connections) == 1
    gone.close()
    assert harness.gateway.connections.monitor.socket.poll(TIMEOUT)
    harness.run_until(lambda: harness.gateway.ledger.get("a"))
    harness.run_heartbeats(2)
    assert harness.is_empty()


def test_asked_again_on_another_connection(start_gateway: Start) -> None:
    """The last client that asks gets all of it; the client before is notified."""
    harness = start_gateway()
    first, second = harness.connect(), harness.connect()
    harness.submit(first, "a", stream=True)
    harness.tokenize()
    harness.send_tokens("a", 0, 2)
    assert isinstance(harness.receive_reply(first), TextDelta)
    harness.send(second, request("a", stream=True))
    so_far = harness.receive_reply(second)
    assert (so_far.token_offset, so_far.char_offset, so_far.text) == (0, 0, "xx")
    moved = harness.receive_reply(first)
    assert isinstance(moved, ErrorReply)
    assert (moved.code, moved.request_id) == ("failed", "a")
    assert moved.message == "request 'a' is answered on another connection now"
    leave(harness, first)
    harness.run_heartbeats(3)
    harness.send_tokens("a", 2, 3, finish_reason="stop")
    assert harness.receive_reply(second).token_offset == 2
    assert isinstance(harness.receive_reply(second), GenerateReply)
    assert harness.is_empty()


def test_asked_again_on_the_same_connection(start_gateway: Start) -> None:
    """As a REQ socket does that has waited long enough: what is before the message counts."""
    harness = start_gateway()
    client = harness.connect()
    for number in (b"1", b"2"):
        client.send_multipart([number, b"", MSGPACK.encode(request("a"))])
    ledger = harness.gateway.ledger
    harness.run_until(lambda: (entry := ledger.get("a")) and b"2" in entry.client.envelope)
    harness.tokenize()
    harness.send_tokens("a", 0, 2, finish_reason="stop")
    assert client.recv_multipart()[:-1] == [b"2", b""]
    harness.submit(client, "b")
    harness.tokenize()
    harness.send_tokens("b", 0, 2, finish_reason="stop")
    assert harness.receive_reply(client).request_id == "b"  # and nothing else for the first
    assert harness.is_empty()


def test_another_request_of_the_same_id_is_refused(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a")
    harness.send(client, request("a", max_tokens=9))
    refused = harness.receive_reply(client)
    assert (refused.code, refused.field) == ("invalid", "request_id")
    assert refused.request_id == "a"
    assert refused.message.startswith("request_id: got 'a', which another open request has")
    assert harness.gateway.ledger.get("a")


def test_attempts_begin_where_the_gateway_does(start_gateway: Start) -> None:
    harness = start_gateway()
    (started,) = harness.scheduler_messages()
    assert isinstance(started, GatewayStarted)
    assert started.first_attempt == first_number(3)
    harness.submit(harness.connect(), "a")
    assert harness.tokenize().attempt == started.first_attempt


def test_the_monitor_has_no_limit(start_gateway: Start) -> None:
    """libzmq would wait, and with it all clients, if nobody read its events."""
    harness = start_gateway(endpoint="tcp://127.0.0.1:*")
    host, _, port = harness.endpoint.removeprefix("tcp://").partition(":")
    for _ in range(1500):
        socket.create_connection((host, int(port))).close()
    client = harness.connect()
    harness.send(client, request("a"))
    assert harness.gateway.clients.channel.socket.poll(TIMEOUT)
    harness.run_until(lambda: harness.gateway.ledger.get("a"))
    assert len(harness.gateway.connections) == 1
