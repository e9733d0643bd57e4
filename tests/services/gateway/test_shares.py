"""Shares of clients, and who may name clients."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.fair_queue import RESERVED, exceeds
from penstock.protocol.messages.client import JSON, ChatMessage, ErrorReply, TokenizePromptRequest
from penstock.services.gateway.connections import Connections
from penstock.services.gateway.request import Client
from penstock.services.gateway.tokenizers import MAX_BYTES
from tests.services.gateway.conftest import GatewayHarness, request


@given(st.lists(st.sampled_from("abcd"), max_size=200), st.integers(1, 40))
def test_whoever_has_few_gets_a_place_after_one_has_filled_the_limit(
    asking: str, limit: int
) -> None:
    """Each client leaves as much of the reserve free as it has, as far as possible."""
    own = dict.fromkeys(["greedy", *"abcd"], 0)

    def ask(client: str) -> bool:
        total = sum(own.values())
        is_let_in = not exceeds(1, own[client], total, limit)
        own[client] += is_let_in
        return is_let_in

    while ask("greedy"):
        pass
    assert own["greedy"] == limit
    reserved = -(-limit // RESERVED)
    for client in asking:
        free = limit + reserved - sum(own.values())
        has_few = own[client] < free
        assert ask(client) == has_few
    assert sum(own.values()) <= limit + reserved


def test_shares_are_forgotten_with_their_requests() -> None:
    connections = Connections(None)  # type: ignore[arg-type]
    client = Client((b"c",), JSON, one := connections.open(5, is_inner=True), one.share)
    share = connections.named_client(client, "10.0.0.1").share
    assert connections.named_client(client, "10.0.0.1").share is share
    del share
    assert "10.0.0.1" not in connections._shares
    names = {connections.open(fd).share.name for fd in range(3)}
    assert len(names) == 3


def test_one_client_that_fills_all_places_leaves_one(
    start_gateway: Callable[..., GatewayHarness],
) -> None:
    harness = start_gateway(max_num_seqs=2, max_waiting_requests=2)
    socket = harness.connect_inside()
    harness.submit(socket, "a", "b", "c", "d", client="greedy")
    harness.send(socket, request("e", client="greedy"))
    refused = harness.receive_reply(socket)
    assert isinstance(refused, ErrorReply)
    assert refused.code == "overloaded"
    harness.submit(socket, "mine", client="other")
    harness.send(socket, request("more", client="other"))
    assert harness.receive_reply(socket).code == "overloaded"
    for request_id in ("a", "mine"):
        harness.send_tokens(request_id, 0, 1, finish_reason="stop")
    harness.submit(socket, "e", client="greedy")
    assert [share.num_open for share in map(share_of(harness), ("b", "e"))] == [4, 4]


def share_of(harness: GatewayHarness) -> Callable[[str], object]:
    return lambda request_id: harness.gateway.ledger.get(request_id).share  # type: ignore[union-attr]


def test_shares_end_at_nothing(start_gateway: Callable[..., GatewayHarness]) -> None:
    harness = start_gateway()
    socket = harness.connect()
    harness.submit(socket, "a", "b", "c")
    share = share_of(harness)("a")
    harness.tokenize()
    harness.send_tokens("a", 0, 3)
    assert share.num_open == 3  # type: ignore[attr-defined]
    for request_id in "abc":
        harness.send_tokens(request_id, 0, 4, finish_reason="stop")
    assert vars(share) == {
        "name": f"process {os.getpid()}",
        "num_open": 0,
        "num_waiting_tokens": 0,
        "num_bytes": 0,
        "num_waiting": 0,
        "num_started": 0,
    }


def test_connections_of_one_process_are_one_client(
    start_gateway: Callable[..., GatewayHarness],
) -> None:
    harness = start_gateway()
    many = [harness.connect() for _ in range(3)]
    for number, socket in enumerate(many):
        harness.submit(socket, f"{number}")
    shares = [share_of(harness)(f"{number}") for number in range(3)]
    assert shares == [shares[0]] * 3
    harness.submit(harness.connect_inside(), "other", client="10.0.0.1")
    tasks = [harness.tokenize() for _ in range(4)]
    assert [task.request_id for task in tasks] == ["0", "other", "1", "2"]
    assert len({task.client for task in tasks}) == 4  # of which three have a turn together


@pytest.mark.parametrize("where", ["127.0.0.1", "[::1]"])
def test_connections_of_one_address_are_one_client(
    start_gateway: Callable[..., GatewayHarness], where: str
) -> None:
    harness = start_gateway(endpoint=f"tcp://{where}:*")
    for number in range(3):
        harness.submit(harness.connect(IPV6=1), f"{number}")
    names = {share_of(harness)(f"{number}").name for number in range(3)}  # type: ignore[attr-defined]
    assert names == {"127.0.0.1" if where == "127.0.0.1" else "::/64"}


def test_connections_with_one_key_are_one_client(
    start_gateway: Callable[..., GatewayHarness], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, None)
    make_keys(keys, "alice")
    harness = start_gateway(curve_keys=str(keys), endpoint="tcp://127.0.0.1:*")
    for number, client in enumerate(("alice", "client", "alice")):
        socket = harness.connect(keys, client=client)
        harness.submit(socket, f"{number}")
    alice, client, again = (share_of(harness)(f"{number}") for number in range(3))
    assert alice is again is not client


def test_what_is_kept_of_a_request_is_its_bytes(
    start_gateway: Callable[..., GatewayHarness],
) -> None:
    harness = start_gateway()
    socket, message = harness.connect(), ChatMessage(role="user", content="x")
    kept = {"chat_template_kwargs": {"x": [[] for _ in range(60_000)]}}
    gc.collect()
    before = len(gc.get_objects())
    harness.submit(socket, "a", prompt=None, messages=[message], **kept)
    harness.send(socket, TokenizePromptRequest(messages=[message], **kept))
    harness.run_until(lambda: len(harness.gateway.default.queries))
    gc.collect()
    assert len(gc.get_objects()) < before + 10_000
    assert harness.next_tokenizer_task().chat_template_kwargs == kept["chat_template_kwargs"]


def test_only_our_own_processes_name_clients(start_gateway: Callable[..., GatewayHarness]) -> None:
    harness = start_gateway()
    outside = harness.connect()
    harness.send(outside, request("a", client="10.0.0.1"))
    refused = harness.receive_reply(outside)
    assert (refused.code, refused.field) == ("invalid", "client")
    inside = harness.connect_inside()
    harness.submit(inside, "b", client="10.0.0.1")
    harness.submit(inside, "c", client="10.0.0.1", priority=-3)
    harness.submit(inside, "d", client="10.0.0.2")
    tasks = [harness.tokenize() for _ in range(3)]
    found = [(task.request_id, task.client, task.priority) for task in tasks]
    assert found == [("c", "10.0.0.1", -3), ("d", "10.0.0.2", 0), ("b", "10.0.0.1", 0)]


def test_one_client_does_not_block_the_tokenizers_for_another(
    start_gateway: Callable[..., GatewayHarness],
) -> None:
    harness = start_gateway()
    greedy, other = harness.connect(), harness.connect()
    first = harness.connect()
    harness.submit(first, "first")
    assert harness.tokenize().request_id == "first"
    long = "word " * (MAX_BYTES // 8)
    harness.submit(greedy, *(f"long {n}" for n in range(20)), prompt=long)
    harness.submit(other, "short")
    assert "short" in [harness.tokenize().request_id for _ in range(3)]
