"""Clients that disconnect, come back and resubmit, and whose share of the work each is."""

import gc
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.messages.client import (
    MSGPACK,
    ChatMessage,
    TextDelta,
    TokenizePromptRequest,
)
from penstock.services.gateway.connections import Connections
from penstock.services.gateway.tokenizers import MAX_BYTES
from tests.services.gateway.conftest import TIMEOUT, Harness, Socket, Start, request

# ---- clients that leave and come back ----------------------------------------------------------


@pytest.mark.parametrize("where", ["tcp", "ipc", "curve"])
def test_requests_of_a_client_that_is_gone_end(
    start_gateway: Start, tmp_path: Path, keys: Path, where: str
) -> None:
    folder = keys if where == "curve" else None
    endpoint = f"ipc://{tmp_path}/c" if where == "ipc" else "tcp://127.0.0.1:*"
    harness = start_gateway(endpoint=endpoint, curve_keys=str(folder or ""))
    gone, stays = harness.connect(folder), harness.connect(folder)
    harness.submit(gone, "a")
    harness.submit(gone, "b", stream=True)
    harness.submit(stays, "c")
    harness.leave(gone)
    harness.run_heartbeats(1)
    assert len(harness.ledger) == 3
    harness.run_heartbeats(1)
    assert [harness.ledger.get(name) is None for name in "abc"] == [True, True, False]
    assert sorted(request_id for request_id, _ in harness.releases()) == ["a", "b"]


@pytest.mark.parametrize("has_left", [True, False])
def test_the_last_connection_that_asks_gets_all_of_a_stream(
    harness: Harness, has_left: bool
) -> None:
    """The client before, if it is still there, is notified."""
    first, second = harness.connect(), harness.connect()
    harness.submit(first, "a", stream=True)
    harness.tokenize()
    harness.send_tokens("a", 0, 3)
    if has_left:
        harness.leave(first)
        harness.run_heartbeats(1)
    harness.send(second, request("a", stream=True))
    so_far = harness.receive_reply(second)
    assert (so_far.token_offset, so_far.char_offset, so_far.text) == (0, 0, "xxx")
    if not has_left:
        assert isinstance(harness.receive_reply(first), TextDelta)
        moved = harness.receive_reply(first)
        assert (moved.code, moved.request_id) == ("failed", "a")
        assert moved.message == "request 'a' is answered on another connection now"
        harness.leave(first)
    harness.run_heartbeats(3)
    harness.send_tokens("a", 3, 5, finish_reason="stop")
    assert harness.receive_reply(second).token_offset == 3
    assert harness.receive_reply(second).token_ids == [0, 1, 2, 3, 4]
    assert harness.is_empty()


def test_an_answer_waits_for_a_client_that_comes_back(harness: Harness) -> None:
    first, second = harness.connect(), harness.connect()
    harness.submit(first, "a")
    harness.tokenize()
    harness.leave(first)
    harness.send_tokens("a", 0, 3, finish_reason="stop")
    harness.send(second, request("a"))
    assert harness.receive_reply(second).token_ids == [0, 1, 2]
    assert harness.is_empty()
    assert not harness.tokenizer.socket.poll(0)


def test_events_count_before_the_request_that_is_read_behind_them(harness: Harness) -> None:
    """The gateway has the request of a new connection in hand.

    It has heard of the end of neither the connection before nor of this one.
    """
    first = harness.connect()
    harness.submit(first, "a")
    first.close()
    assert harness.connections.monitor.socket.poll(TIMEOUT)
    second = harness.connect()
    harness.send(second, request("b"))
    assert harness.clients.channel.socket.poll(TIMEOUT)
    harness.gateway.on_clients()
    harness.run_heartbeats(2)
    assert [harness.ledger.get(name) is None for name in "ab"] == [True, False]


def test_a_request_that_is_read_when_its_client_has_gone(harness: Harness) -> None:
    gone = harness.connect()
    harness.send(gone, request("a"))
    assert harness.clients.channel.socket.poll(TIMEOUT)
    harness.connections.handle_events()
    assert len(harness.connections) == 1
    gone.close()
    assert harness.connections.monitor.socket.poll(TIMEOUT)
    harness.run_until(lambda: harness.ledger.get("a"))
    harness.run_heartbeats(2)
    assert harness.is_empty()


def test_asked_again_on_the_same_connection(harness: Harness, client: Socket) -> None:
    """As a REQ socket does that has waited long enough: what is before the message counts."""
    for number in (b"1", b"2"):
        client.send_multipart([number, b"", MSGPACK.encode(request("a"))])
    ledger = harness.ledger
    harness.run_until(lambda: (known := ledger.get("a")) and b"2" in known.client.envelope)
    harness.tokenize()
    harness.send_tokens("a", 0, 2, finish_reason="stop")
    assert client.recv_multipart()[:-1] == [b"2", b""]
    harness.submit(client, "b")
    harness.tokenize()
    harness.send_tokens("b", 0, 2, finish_reason="stop")
    assert harness.receive_reply(client).request_id == "b"  # and nothing else for the first
    assert harness.is_empty()


def test_another_request_of_the_same_id_is_refused(harness: Harness, client: Socket) -> None:
    harness.submit(client, "a")
    harness.send(client, request("a", max_tokens=9))
    refused = harness.receive_reply(client)
    assert (refused.code, refused.field, refused.request_id) == ("invalid", "request_id", "a")
    assert refused.message.startswith("request_id: got 'a', which another open request has")
    assert harness.get("a")


# ---- file descriptors, which the system uses again ---------------------------------------------

LEFT, NEXT = b"\0\0\0\0\1", b"\0\0\0\0\2"


@pytest.fixture
def connections() -> Connections:
    return Connections(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_read", [0, 1])
@pytest.mark.parametrize("left", [LEFT, b"chosen"])
def test_waiting_messages_of_a_closed_connection(
    connections: Connections, num_read: int, left: bytes
) -> None:
    """The next connection has the same descriptor, and its messages come between the old ones."""
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


def test_a_client_comes_back_with_the_identity_that_it_has_chosen(connections: Connections) -> None:
    for _ in range(3):
        connections.open(5)
        assert not connections.sender(5, b"chosen").is_closed
        connections.close(5)
    assert connections.sender(5, b"chosen").is_closed


def test_the_monitor_has_no_limit(start_gateway: Start) -> None:
    """libzmq would wait, and with it all clients, if nobody read its events."""
    harness = start_gateway(endpoint="tcp://127.0.0.1:*")
    host, _, port = harness.endpoint.removeprefix("tcp://").partition(":")
    for _ in range(1500):
        socket.create_connection((host, int(port))).close()
    client = harness.connect()
    harness.send(client, request("a"))
    assert harness.clients.channel.socket.poll(TIMEOUT)
    harness.run_until(lambda: harness.ledger.get("a"))
    assert len(harness.connections) == 1


# ---- shares ------------------------------------------------------------------------------------


def share_of(harness: Harness, request_id: object) -> Any:
    return harness.get(str(request_id)).share


def test_shares_are_forgotten_with_their_requests(connections: Connections) -> None:
    share = connections.share("10.0.0.1")
    assert connections.share("10.0.0.1") is share
    del share
    assert "10.0.0.1" not in connections._shares
    assert len({connections.open(fd).share.name for fd in range(3)}) == 3


def test_one_client_that_fills_all_places_leaves_one(start_gateway: Start) -> None:
    harness = start_gateway(max_num_seqs=2, max_waiting_requests=2)
    client = harness.connect_inside()
    harness.submit(client, "a", "b", "c", "d", client="greedy")
    harness.send(client, request("e", client="greedy"))
    assert harness.receive_reply(client).code == "overloaded"
    harness.submit(client, "mine", client="other")
    harness.send(client, request("more", client="other"))
    assert harness.receive_reply(client).code == "overloaded"
    for request_id in ("a", "mine"):
        harness.send_tokens(request_id, 0, 1, finish_reason="stop")
    harness.submit(client, "e", client="greedy")
    assert [share_of(harness, name).num_open for name in "be"] == [4, 4]


def test_shares_end_at_nothing(harness: Harness, client: Socket) -> None:
    harness.submit(client, "a", "b", "c")
    share = share_of(harness, "a")
    harness.tokenize()
    harness.send_tokens("a", 0, 3)
    assert (share.name, share.num_open) == (f"process {os.getpid()}", 3)
    for request_id in "abc":
        harness.send_tokens(request_id, 0, 4, finish_reason="stop")
    assert not any(number for field, number in vars(share).items() if field != "name")


def test_connections_of_one_process_are_one_client(harness: Harness) -> None:
    many = [harness.connect() for _ in range(3)]
    for number, client in enumerate(many):
        harness.submit(client, f"{number}")
    assert len({share_of(harness, number) for number in range(3)}) == 1
    harness.submit(harness.connect_inside(), "other", client="10.0.0.1")
    tasks = [harness.tokenize() for _ in range(4)]
    assert [task.request_id for task in tasks] == ["0", "other", "1", "2"]
    assert len({task.client for task in tasks}) == 4  # of which three have a turn together


@pytest.mark.parametrize(("where", "name"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::/64")])
def test_connections_of_one_address_are_one_client(
    start_gateway: Start, where: str, name: str
) -> None:
    harness = start_gateway(endpoint=f"tcp://{where}:*")
    for number in range(3):
        harness.submit(harness.connect(IPV6=1), f"{number}")
    assert {share_of(harness, number).name for number in range(3)} == {name}


def test_connections_with_one_key_are_one_client(start_gateway: Start, keys: Path) -> None:
    harness = start_gateway(curve_keys=str(keys), endpoint="tcp://127.0.0.1:*")
    for number, client in enumerate(("alice", "client", "alice")):
        harness.submit(harness.connect(keys, client=client), f"{number}")
    alice, client, again = (share_of(harness, number) for number in range(3))
    assert alice is again is not client


def test_what_is_kept_of_a_request_is_its_bytes(harness: Harness) -> None:
    client, message = harness.connect(), ChatMessage(role="user", content="x")
    kept = {"chat_template_kwargs": {"x": [[] for _ in range(60_000)]}}
    gc.collect()
    before = len(gc.get_objects())
    harness.submit(client, "a", prompt=None, messages=[message], **kept)
    harness.ask(client, TokenizePromptRequest(messages=[message], **kept))
    gc.collect()
    assert len(gc.get_objects()) < before + 10_000
    assert harness.next_tokenizer_task().chat_template_kwargs == kept["chat_template_kwargs"]


def test_only_our_own_processes_name_clients(harness: Harness) -> None:
    outside, inside = harness.connect(), harness.connect_inside()
    harness.send(outside, request("a", client="10.0.0.1"))
    refused = harness.receive_reply(outside)
    assert (refused.code, refused.field) == ("invalid", "client")
    harness.submit(inside, "b", client="10.0.0.1")
    harness.submit(inside, "c", client="10.0.0.1", priority=-3)
    harness.submit(inside, "d", client="10.0.0.2")
    tasks = [harness.tokenize() for _ in range(3)]
    found = [(task.request_id, task.client, task.priority) for task in tasks]
    assert found == [("c", "10.0.0.1", -3), ("d", "10.0.0.2", 0), ("b", "10.0.0.1", 0)]


def test_one_client_does_not_block_the_tokenizers_for_another(harness: Harness) -> None:
    first, greedy, other = (harness.connect() for _ in range(3))
    harness.submit(first, "first")
    assert harness.tokenize().request_id == "first"
    long = "word " * (MAX_BYTES // 8)
    harness.submit(greedy, *(f"long {n}" for n in range(20)), prompt=long)
    harness.submit(other, "short")
    assert "short" in [harness.tokenize().request_id for _ in range(3)]
