"""Work of tokenizers: each piece is done once, and what kills tokenizers is given up."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.client import (
    JSON,
    MSGPACK,
    AbortRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    GenerateRequest,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.pipeline import (
    TokenizerQuery,
)
from penstock.protocol.poison import MAX_DEATHS
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.protocol.transport.peers import MAX_SILENT
from penstock.services.gateway.request import Share
from penstock.services.gateway.tokenizers import TokenizerPoison, Tokenizers
from tests.services.gateway.conftest import Harness, Socket, Start

TEXT = DetokenizeRequest(token_ids=[1, 2])
PROMPT = TokenizePromptRequest(prompt="ab")
TEXT_REPLY = DetokenizeReply(text="")


# ---- queries, which a tokenizer answers alone --------------------------------------------------


def test_both_kinds_in_both_encodings(harness: Harness, client: Socket) -> None:
    """They wait for a tokenizer to come."""
    client.send(JSON.encode(TEXT))
    harness.ask(client, PROMPT, waiting=2)
    asked = {type(task.query): task for task in (harness.next_tokenizer_task() for _ in range(2))}
    assert [task.query for task in asked.values()] == [TEXT, PROMPT]
    harness.answer_query(DetokenizeReply(text="é"), asked[DetokenizeRequest].number)
    assert harness.receive_reply(client, JSON) == DetokenizeReply(text="é")
    reply = TokenizeReply(token_ids=[97, 98], max_model_len=4096)
    harness.answer_query(reply, asked[TokenizePromptRequest].number)
    assert harness.receive_reply(client) == reply
    assert harness.is_empty()


def test_a_tokenizer_that_is_lost(harness: Harness, client: Socket) -> None:
    """The next tokenizer gets the query; a late answer of the first one is dropped."""
    harness.ask(client, TEXT)
    first = harness.next_tokenizer_task()
    harness.lose_tokenizer()
    assert harness.next_tokenizer_task() == first
    harness.answer_query(DetokenizeReply(text="not this"), 0)  # of an earlier gateway
    for text in ("a", "b"):
        harness.answer_query(DetokenizeReply(text=text), first.number)
    assert harness.receive_reply(client) == DetokenizeReply(text="a")
    harness.ask(client, TEXT)
    assert not client.poll(0)
    assert harness.next_tokenizer_task().number > first.number


def test_a_tokenizer_has_requests_and_queries(harness: Harness, client: Socket) -> None:
    harness.submit(client, "b")
    harness.ask(client, TEXT, TEXT)
    [task, *queries] = [harness.next_tokenizer_task() for _ in range(3)]
    assert len(harness.work()) == 3
    for query in queries:
        assert isinstance(query, TokenizerQuery)
        harness.answer_query(TEXT_REPLY, query.number)
        harness.receive_reply(client)
    assert list(harness.work()) == [("b", task.request.attempt)]


def test_a_client_that_is_gone_is_forgotten(harness: Harness, client: Socket) -> None:
    harness.ask(client, TEXT)
    harness.leave(client)
    harness.run_heartbeats(1)
    assert harness.is_empty()
    other = harness.connect()
    harness.ask(other, PROMPT)
    assert harness.next_tokenizer_task().query == PROMPT


def test_errors_are_told_and_counted(harness: Harness, client: Socket) -> None:
    harness.send(client, DetokenizeRequest(token_ids=[9999]))
    assert harness.receive_reply(client).field == "token_ids"
    harness.ask(client, PROMPT)
    error = ErrorReply(code="invalid", message="no", field="prompt")
    harness.answer_query(error)
    assert harness.receive_reply(client) == error
    assert harness.model.metrics.request_failed == {"invalid": 2}
    assert harness.is_empty()


@pytest.mark.parametrize(
    ("options", "query", "reason"),
    [
        ({"max_waiting_requests": 0}, TEXT, "1 requests are open"),
        ({"max_open_bytes": len(MSGPACK.encode(TEXT))}, TEXT, "this request has"),
        (
            {"max_waiting_tokens": 1000},
            TokenizePromptRequest(prompt="x" * 3000),
            "1500 prompt tokens would wait, 750 of this request",
        ),
    ],
)
def test_queries_are_limited_as_requests_are(
    start_gateway: Start, options: dict[str, int], query: Any, reason: str
) -> None:
    harness = start_gateway(max_num_seqs=1, **options)
    client = harness.connect()
    harness.ask(client, query)
    harness.send(client, query)
    refused = harness.receive_reply(client)
    assert (refused.code, reason in refused.message) == ("overloaded", True)
    harness.answer_query(TEXT_REPLY)
    harness.receive_reply(client)
    harness.ask(client, query)


def test_what_nobody_waits_for_does_not_reach_a_tokenizer(harness: Harness, client: Socket) -> None:
    """A tokenizer has one long query at a time, and of others as many as it soon answers."""
    gone = harness.connect()
    harness.ask(gone, *[TokenizePromptRequest(prompt="x" * 900_000)] * 15)
    first = harness.next_tokenizer_task()
    harness.ask(client, PROMPT, TEXT, waiting=17)
    harness.leave(gone)
    harness.run_heartbeats(1)
    assert len(harness.model.queries) == 2
    assert not harness.tokenizer.socket.poll(0)
    harness.answer_query(TokenizeReply(token_ids=[], max_model_len=9), first.number)
    harness.run_until(lambda: len(harness.work()) == 2)
    assert [harness.next_tokenizer_task().query for _ in range(2)] == [PROMPT, TEXT]


# ---- deaths ------------------------------------------------------------------------------------


class Reports:
    """Reports that the supervisor receives."""

    def __init__(self) -> None:
        self.died_with: list[tuple[list[tuple[str, int]], int]] = []
        self.num_found = self.num_cleared = 0

    def clear(self, digests: list[bytes]) -> None:
        self.num_cleared += len(digests)

    def died(self, processes: list[tuple[str, int]], suspects: list[bytes]) -> None:
        self.died_with.append((processes, len(suspects)))

    def found(self, _digest: bytes) -> None:
        self.num_found += 1


@pytest.fixture
def reports(harness: Harness) -> Reports:
    reports: Any = Reports()
    harness.model.poison._reports = reports
    return reports


def fall_silent(harness: Harness) -> None:
    tokenizers = harness.model.tokenizers
    for _ in range(MAX_MISSED_HEARTBEATS + 1):
        tokenizers.lose_silent()
    assert not len(tokenizers.peers)


def test_what_is_alone_at_two_deaths_is_given_up(
    harness: Harness, client: Socket, reports: Reports
) -> None:
    harness.start_tokenizer()
    for name in ("before", "poison", "after"):
        harness.submit(client, name, prompt=name)
    harness.tokenize()
    harness.send_tokens("before", 0, 1)
    assert harness.given() == ["poison", "after"]
    for _ in range(MAX_DEATHS):
        harness.start_tokenizer()
        assert harness.given() == ["poison"], "alone"
    harness.submit(client, "late", prompt="late")
    harness.start_tokenizer()
    failed = harness.receive_reply(client)
    assert (failed.request_id, failed.code) == ("poison", "failed")
    assert "2 tokenizers died while they worked at the request" in failed.message
    assert harness.given() == ["after"], "a suspect, too"
    harness.tokenize()
    assert harness.given() == ["late"]
    harness.tokenize()
    assert all(map(harness.ledger.get, ("before", "after", "late")))
    assert reports.num_found == 1
    assert reports.num_cleared == 1, "what was tokenized after the deaths"
    died_with = [([("tokenizer.1", 100 + n)], 2 if n == 1 else 1) for n in (1, 2, 3)]
    assert reports.died_with == died_with
    harness.send(client, GenerateRequest(prompt="poison", seed=1))
    assert "it is not tried again" in harness.receive_reply(client).message


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_query_is_given_up_likewise(
    harness: Harness, client: Socket, reports: Reports, is_silent: bool
) -> None:
    """A tokenizer that fell silent has died when its successor registers."""
    poison = TokenizePromptRequest(prompt="poison")
    harness.start_tokenizer()
    harness.ask(client, poison)
    for _ in range(MAX_DEATHS):
        if is_silent:
            fall_silent(harness)
        harness.start_tokenizer()
    assert harness.receive_reply(client).code == "failed"
    assert [digests for _, digests in reports.died_with] == [1] * MAX_DEATHS
    assert harness.is_empty()
    harness.send(client, poison)
    assert "it is not tried again" in harness.receive_reply(client).message


def test_who_was_alone_once_and_is_done_begins_at_none(harness: Harness, client: Socket) -> None:
    poison = harness.model.poison
    harness.start_tokenizer()
    for name in ("r0", "r1", "r2"):
        harness.submit(client, name, prompt="same")
        harness.start_tokenizer()
        assert poison.num_deaths(harness.get(name).message) == 1
        harness.tokenize()
        harness.send_tokens(name, 0, 1)
    assert all(map(harness.ledger.get, ("r0", "r1", "r2")))


def test_who_leaves_and_asks_again_is_as_suspect_as_before(harness: Harness) -> None:
    harness.start_tokenizer()
    for number in range(MAX_DEATHS):
        client = harness.connect()
        harness.submit(client, f"r{number}", prompt="poison")
        if number < MAX_DEATHS - 1:
            harness.send(client, AbortRequest(request_id=f"r{number}"))
            harness.receive_reply(client)
            assert harness.receive_reply(client).found
        harness.start_tokenizer()
    assert harness.receive_reply(client).code == "failed"


def test_silence_and_goodbye_are_no_death(
    harness: Harness, client: Socket, reports: Reports
) -> None:
    """The tokenizer sends again after a call that held the interpreter's lock."""
    harness.start_tokenizer()
    harness.submit(client, "a", prompt="a")
    for _ in range(2 * MAX_DEATHS):
        fall_silent(harness)
        harness.register_tokenizer()
        assert harness.given() == ["a"]
    for _ in range(2 * MAX_DEATHS):
        harness.lose_tokenizer()
        harness.start_tokenizer()
        assert harness.given() == ["a"]
    assert reports.died_with == []
    harness.tokenize()


def test_few_tokenizers_without_a_successor_are_remembered(
    harness: Harness, client: Socket
) -> None:
    """Each was killed and scaled down while it had work; the last one passes the work on."""
    harness.submit(client, "a", prompt="a")
    for number in range(2 * MAX_SILENT):
        harness.start_tokenizer(f"tokenizer.{number}")
        fall_silent(harness)
        assert 0 < len(harness.model.tokenizers.peers.remembered) <= MAX_SILENT
    harness.start_tokenizer("tokenizer.last")
    harness.tokenize()
    assert not harness.model.tokenizers.peers.remembered


# ---- deaths in any order -----------------------------------------------------------------------


class Wire:
    """Tokenizers that work in order, and die at poison; everything is sent."""

    def __init__(self) -> None:
        self.queues: dict[bytes, list[int]] = {}

    def send(self, key: int, to: bytes) -> bool:
        self.queues[to].append(key)
        return True


def job(key: int) -> Any:
    """Return a piece of work."""

    class Job(SimpleNamespace):
        __hash__ = object.__hash__

    message = GenerateRequest(prompt=[key])
    fields = {"size": 1000, "is_open": True, "share": Share(), "turn": "", "priority": 0}
    return Job(key=key, message=message, submission=lambda: key, **fields)


@given(
    number=st.integers(1, 4),
    is_poison=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=30),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_all_poison_is_found_and_nothing_else(
    number: int, is_poison: list[bool], random: Random
) -> None:
    wire: Any = Wire()
    reports: Any = Reports()
    given_up: list[Any] = []
    done: list[int] = []
    tokenizers = Tokenizers(
        wire,
        TokenizerPoison(reports),
        on_lost=lambda _: None,
        on_poison=given_up.append,
        on_defect=lambda _: None,
    )
    names = 0

    def start() -> None:
        nonlocal names
        names += 1
        identity = b"t%d" % names
        wire.queues[identity] = []
        tokenizers.alive(identity, "t")

    for _ in range(number):
        start()
    jobs = [job(key) for key in range(len(is_poison))]
    while jobs or any(wire.queues.values()):
        busy = [identity for identity, queue in wire.queues.items() if queue]
        if jobs and (not busy or random.random() < 0.5):
            tokenizers.submit(jobs.pop(0))
            continue
        identity = random.choice(busy)
        key = wire.queues[identity].pop(0)
        if is_poison[key]:
            del wire.queues[identity]
            tokenizers.lose(identity)
            start()
        else:
            done.append(key)
            tokenizers.done(identity, key)
    assert sorted(work.key for work in given_up) == [n for n, bad in enumerate(is_poison) if bad]
    assert sorted(done) == [key for key, bad in enumerate(is_poison) if not bad]
    assert names - number <= 3 * len(given_up)
