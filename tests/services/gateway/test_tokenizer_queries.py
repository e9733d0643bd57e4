"""Queries answered by tokenizers alone: each once, even when tokenizers die."""

from collections.abc import Callable

import pytest

from penstock.protocol.messages.client import (
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.codec import JSON, MSGPACK
from penstock.protocol.messages.registration import Goodbye
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.tokenizer import TokenizerQuery, TokenizerReply
from tests.services.gateway.conftest import Stage

Start = Callable[..., Stage]
TEXT = DetokenizeRequest(token_ids=[1, 2])
PROMPT = TokenizePromptRequest(prompt="ab")


def test_both_kinds_in_both_encodings(stage: Start) -> None:
    """They wait for a tokenizer to come."""
    one = stage()
    client = one.connect()
    one.ask(client, PROMPT)
    client.send(JSON.encode(TEXT))
    one.work_until(lambda: len(one.gateway.requests.queries) == 2)
    asked = [one.ask_tokenizer() for _ in range(2)]
    assert [question.question for question in asked] == [PROMPT, TEXT]
    one.tokenizer.send(TokenizerReply(asked[1].number, DetokenizeReply(text="é")))
    one.work_until(lambda: len(one.gateway.requests.queries) == 1)
    assert JSON.decode_reply(client.recv()) == DetokenizeReply(text="é")
    reply = TokenizeReply(token_ids=[97, 98], max_model_len=4096)
    one.tokenizer.send(TokenizerReply(asked[0].number, reply))
    assert one.hear(client) == reply
    assert one.is_empty()


def test_a_tokenizer_that_is_lost(stage: Start) -> None:
    """The next tokenizer gets the query; a late answer of the first one is dropped."""
    one = stage()
    client = one.connect()
    one.ask(client, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    first = one.ask_tokenizer()
    one.tokenizer.send(Goodbye())
    one.work_until(lambda: not len(one.gateway.tokenizers.peers))
    assert one.ask_tokenizer() == first
    for text in ("a", "b"):
        one.tokenizer.send(TokenizerReply(first.number, DetokenizeReply(text=text)))
    assert one.hear(client) == DetokenizeReply(text="a")
    one.ask(client, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    assert not client.poll(0)
    assert one.ask_tokenizer().number > first.number


def test_each_goes_to_the_tokenizer_that_has_the_least(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a")
    one.tokenize()
    one.open(client, "b")
    one.ask(client, TEXT, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries) == 2)
    peer = one.gateway.tokenizers.peers.get(b"t")
    assert peer
    assert len(peer.work) == 3
    work = [one.ask_tokenizer() for _ in range(3)]
    for question in work[1:]:
        assert isinstance(question, TokenizerQuery)
        one.tokenizer.send(TokenizerReply(question.number, DetokenizeReply(text="")))
        one.hear(client)
    assert list(peer.work) == [("b", work[0].attempt)]


def test_an_answer_meant_for_an_earlier_gateway(stage: Start) -> None:
    """Its numbers are smaller than any of this one."""
    one = stage()
    client = one.connect()
    one.ask(client, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    number = one.ask_tokenizer().number
    one.tokenizer.send(TokenizerReply(0, DetokenizeReply(text="not this")))
    one.tokenizer.send(TokenizerReply(number, DetokenizeReply(text="this")))
    assert one.hear(client) == DetokenizeReply(text="this")


def test_a_client_that_is_gone_is_forgotten(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.ask(client, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    client.close()
    one.work_until(lambda: len(one.gateway.connections) == 0)
    one.heartbeats(1)
    assert one.is_empty()
    other = one.connect()
    one.ask(other, PROMPT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    assert one.ask_tokenizer().question == PROMPT


def test_errors_are_told_and_counted(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.ask(client, DetokenizeRequest(token_ids=[9999]))
    assert one.hear(client).field == "token_ids"
    one.ask(client, PROMPT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    error = ErrorReply(code="invalid", message="no", field="prompt")
    one.tokenizer.send(TokenizerReply(one.ask_tokenizer().number, error))
    assert one.hear(client) == error
    assert one.gateway.status(metrics=True).metrics.request_failed == {"invalid": 2}  # type: ignore[union-attr]
    assert one.is_empty()


@pytest.mark.parametrize(
    "limit", [{"max_waiting_requests": 0}, {"max_open_bytes": len(MSGPACK.encode(TEXT))}]
)
def test_they_count_among_what_is_let_in(stage: Start, limit: dict[str, int]) -> None:
    one = stage(max_num_seqs=1, **limit)
    client = one.connect()
    one.ask(client, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    one.ask(client, TEXT)
    assert one.hear(client).code == "overloaded"
    one.tokenizer.send(TokenizerReply(one.ask_tokenizer().number, DetokenizeReply(text="")))
    one.hear(client)
    one.ask(client, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries))


def test_a_drain_waits_for_them(stage: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stage()
    ended: list[int] = []
    monkeypatch.setattr("signal.raise_signal", ended.append)
    client = one.connect()
    one.ask(client, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries))
    one.gateway.requests.is_draining = True
    one.gateway.router.take_status(SchedulerStatus(epoch=1, ready=True))
    one.ask(client, TEXT)
    assert one.hear(client).code == "overloaded"
    assert not ended
    one.tokenizer.send(TokenizerReply(one.ask_tokenizer().number, DetokenizeReply(text="")))
    one.hear(client)
    one.timers[-1].fire()
    assert ended


def test_what_nobody_waits_for_does_not_reach_a_tokenizer(stage: Start) -> None:
    """A tokenizer has one long question at a time, and of others as many as it soon answers."""
    one = stage()
    long = TokenizePromptRequest(prompt="x" * 900_000)
    gone, client = one.connect(), one.connect()
    one.ask(gone, *[long] * 15)
    one.work_until(lambda: len(one.gateway.requests.queries) == 15)
    first = one.ask_tokenizer()
    one.ask(client, PROMPT, TEXT)
    one.work_until(lambda: len(one.gateway.requests.queries) == 17)
    gone.close()
    one.work_until(lambda: len(one.gateway.connections) == 1)
    one.heartbeats(1)
    assert len(one.gateway.requests.queries) == 2
    assert not one.tokenizer.socket.poll(0)
    one.tokenizer.send(TokenizerReply(first.number, TokenizeReply(token_ids=[], max_model_len=9)))
    peer = one.gateway.tokenizers.peers.get(b"t")
    assert peer
    one.work_until(lambda: len(peer.work) == 2)
    assert [one.ask_tokenizer().question for _ in range(2)] == [PROMPT, TEXT]


def test_their_tokens_wait_as_those_of_requests_do(stage: Start) -> None:
    one = stage(max_waiting_tokens=1000)
    client = one.connect()
    long = TokenizePromptRequest(prompt="x" * 3000)
    one.ask(client, long, long, TEXT)
    refused = one.hear(client)
    assert "1500 prompt tokens would wait, 750 of this request" in refused.message
    one.work_until(lambda: len(one.gateway.requests.queries) == 2)
    one.tokenizer.send(TokenizerReply(one.ask_tokenizer().number, DetokenizeReply(text="")))
    one.hear(client)
    one.ask(client, long)
    one.work_until(lambda: len(one.gateway.requests.queries) == 2)
