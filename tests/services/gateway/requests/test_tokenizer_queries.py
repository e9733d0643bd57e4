"""Queries answered by tokenizers alone: each once, even when tokenizers die."""

from collections.abc import Callable

import pytest

from penstock.protocol.messages.client import (
    JSON,
    MSGPACK,
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.pipeline import Goodbye, TokenizerQuery, TokenizerReply
from penstock.protocol.messages.status import SchedulerStatus
from tests.services.gateway.conftest import GatewayHarness

Start = Callable[..., GatewayHarness]
TEXT = DetokenizeRequest(token_ids=[1, 2])
PROMPT = TokenizePromptRequest(prompt="ab")


def test_both_kinds_in_both_encodings(start_gateway: Start) -> None:
    """They wait for a tokenizer to come."""
    harness = start_gateway()
    client = harness.connect()
    harness.send(client, PROMPT)
    client.send(JSON.encode(TEXT))
    harness.run_until(lambda: len(harness.gateway.default.queries) == 2)
    asked = [harness.next_tokenizer_task() for _ in range(2)]
    assert [query.query for query in asked] == [PROMPT, TEXT]
    harness.tokenizer.send(TokenizerReply(asked[1].number, DetokenizeReply(text="é")))
    harness.run_until(lambda: len(harness.gateway.default.queries) == 1)
    assert JSON.decode_reply(client.recv()) == DetokenizeReply(text="é")
    reply = TokenizeReply(token_ids=[97, 98], max_model_len=4096)
    harness.tokenizer.send(TokenizerReply(asked[0].number, reply))
    assert harness.receive_reply(client) == reply
    assert harness.is_empty()


def test_a_tokenizer_that_is_lost(start_gateway: Start) -> None:
    """The next tokenizer gets the query; a late answer of the first one is dropped."""
    harness = start_gateway()
    client = harness.connect()
    harness.send(client, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    first = harness.next_tokenizer_task()
    harness.tokenizer.send(Goodbye())
    harness.run_until(lambda: not len(harness.gateway.default.tokenizers.peers))
    assert harness.next_tokenizer_task() == first
    for text in ("a", "b"):
        harness.tokenizer.send(TokenizerReply(first.number, DetokenizeReply(text=text)))
    assert harness.receive_reply(client) == DetokenizeReply(text="a")
    harness.send(client, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    assert not client.poll(0)
    assert harness.next_tokenizer_task().number > first.number


def test_each_goes_to_the_tokenizer_that_has_the_least(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a")
    harness.tokenize()
    harness.submit(client, "b")
    harness.send(client, TEXT, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries) == 2)
    peer = harness.gateway.default.tokenizers.peers.get(b"t")
    assert peer
    assert len(peer.work) == 3
    work = [harness.next_tokenizer_task() for _ in range(3)]
    for query in work[1:]:
        assert isinstance(query, TokenizerQuery)
        harness.tokenizer.send(TokenizerReply(query.number, DetokenizeReply(text="")))
        harness.receive_reply(client)
    assert list(peer.work) == [("b", work[0].request.attempt)]


def test_an_answer_meant_for_an_earlier_gateway(start_gateway: Start) -> None:
    """Its numbers are smaller than any of this one."""
    harness = start_gateway()
    client = harness.connect()
    harness.send(client, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    number = harness.next_tokenizer_task().number
    harness.tokenizer.send(TokenizerReply(0, DetokenizeReply(text="not this")))
    harness.tokenizer.send(TokenizerReply(number, DetokenizeReply(text="this")))
    assert harness.receive_reply(client) == DetokenizeReply(text="this")


def test_a_client_that_is_gone_is_forgotten(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.send(client, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    client.close()
    harness.run_until(lambda: len(harness.gateway.connections) == 0)
    harness.run_heartbeats(1)
    assert harness.is_empty()
    other = harness.connect()
    harness.send(other, PROMPT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    assert harness.next_tokenizer_task().query == PROMPT


def test_errors_are_told_and_counted(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.send(client, DetokenizeRequest(token_ids=[9999]))
    assert harness.receive_reply(client).field == "token_ids"
    harness.send(client, PROMPT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    error = ErrorReply(code="invalid", message="no", field="prompt")
    harness.tokenizer.send(TokenizerReply(harness.next_tokenizer_task().number, error))
    assert harness.receive_reply(client) == error
    assert harness.gateway.status.reply(metrics=True).metrics.request_failed == {"invalid": 2}  # type: ignore[union-attr]
    assert harness.is_empty()


@pytest.mark.parametrize(
    "limit", [{"max_waiting_requests": 0}, {"max_open_bytes": len(MSGPACK.encode(TEXT))}]
)
def test_they_count_among_what_is_let_in(start_gateway: Start, limit: dict[str, int]) -> None:
    harness = start_gateway(max_num_seqs=1, **limit)
    client = harness.connect()
    harness.send(client, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    harness.send(client, TEXT)
    assert harness.receive_reply(client).code == "overloaded"
    harness.tokenizer.send(
        TokenizerReply(harness.next_tokenizer_task().number, DetokenizeReply(text=""))
    )
    harness.receive_reply(client)
    harness.send(client, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries))


def test_a_drain_waits_for_them(start_gateway: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = start_gateway()
    ended: list[int] = []
    monkeypatch.setattr("signal.raise_signal", ended.append)
    client = harness.connect()
    harness.send(client, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries))
    harness.gateway.default.is_draining = True
    harness.gateway.default.router.record_status(SchedulerStatus(epoch=1, ready=True))
    harness.send(client, TEXT)
    assert harness.receive_reply(client).code == "overloaded"
    assert not ended
    harness.tokenizer.send(
        TokenizerReply(harness.next_tokenizer_task().number, DetokenizeReply(text=""))
    )
    harness.receive_reply(client)
    harness.timers[-1].fire()
    assert ended


def test_what_nobody_waits_for_does_not_reach_a_tokenizer(start_gateway: Start) -> None:
    """A tokenizer has one long query at a time, and of others as many as it soon answers."""
    harness = start_gateway()
    long = TokenizePromptRequest(prompt="x" * 900_000)
    gone, client = harness.connect(), harness.connect()
    harness.send(gone, *[long] * 15)
    harness.run_until(lambda: len(harness.gateway.default.queries) == 15)
    first = harness.next_tokenizer_task()
    harness.send(client, PROMPT, TEXT)
    harness.run_until(lambda: len(harness.gateway.default.queries) == 17)
    gone.close()
    harness.run_until(lambda: len(harness.gateway.connections) == 1)
    harness.run_heartbeats(1)
    assert len(harness.gateway.default.queries) == 2
    assert not harness.tokenizer.socket.poll(0)
    harness.tokenizer.send(
        TokenizerReply(first.number, TokenizeReply(token_ids=[], max_model_len=9))
    )
    peer = harness.gateway.default.tokenizers.peers.get(b"t")
    assert peer
    harness.run_until(lambda: len(peer.work) == 2)
    assert [harness.next_tokenizer_task().query for _ in range(2)] == [PROMPT, TEXT]


def test_their_tokens_wait_as_those_of_requests_do(start_gateway: Start) -> None:
    harness = start_gateway(max_waiting_tokens=1000)
    client = harness.connect()
    long = TokenizePromptRequest(prompt="x" * 3000)
    harness.send(client, long, long, TEXT)
    refused = harness.receive_reply(client)
    assert "1500 prompt tokens would wait, 750 of this request" in refused.message
    harness.run_until(lambda: len(harness.gateway.default.queries) == 2)
    harness.tokenizer.send(
        TokenizerReply(harness.next_tokenizer_task().number, DetokenizeReply(text=""))
    )
    harness.receive_reply(client)
    harness.send(client, long)
    harness.run_until(lambda: len(harness.gateway.default.queries) == 2)
