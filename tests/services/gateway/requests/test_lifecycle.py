"""Time limits, tokenizers that are lost, overload, and nothing left of any request."""

from collections.abc import Callable
from random import Random

import pytest

from penstock.protocol.messages.client import JSON, AbortRequest, TextDelta
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import Goodbye, Heartbeat, ReleaseRequest, TextDeltas
from penstock.protocol.messages.status import SchedulerStatus
from penstock.services.gateway.request import Request
from tests.services.gateway.conftest import PROMPT, GatewayHarness, request

Start = Callable[..., GatewayHarness]


def test_a_time_limit_while_there_is_no_tokenizer(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", timeout=2.5)
    harness.submit(client, "b")
    (timer,) = harness.timers
    assert timer.seconds == 2.5
    timer.fire()
    reply = harness.receive_reply(client)
    assert (reply.request_id, reply.finish_reason, reply.token_ids) == ("a", "abort", [])
    assert isinstance(harness.scheduler_messages()[-1], ReleaseRequest)
    assert harness.tokenize().request_id == "b"


def test_a_time_limit_while_it_runs(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", timeout=2.5)
    harness.tokenize()
    harness.send_tokens("a", 0, 3)
    harness.timers[0].fire()
    reply = harness.receive_reply(client)
    assert (reply.finish_reason, reply.token_ids, reply.text) == ("abort", [0, 1, 2], "xxx")
    assert reply.usage.prompt_tokens == len(PROMPT)
    assert harness.is_empty()


def test_a_time_limit_ends_with_the_request(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", timeout=2.5)
    harness.tokenize()
    harness.send_tokens("a", 0, 3, finish_reason="stop")
    assert harness.receive_reply(client).finish_reason == "stop"
    assert harness.is_empty()


def test_a_request_goes_on_behind_what_its_client_has(start_gateway: Start) -> None:
    """Every process except the client may be new."""
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", stream=True, output_token_ids=[0, 1])
    assert harness.tokenize().output_token_ids == pack([0, 1])
    harness.send_tokens("a", 0, 3)
    first = harness.receive_reply(client)
    assert (first.token_offset, first.char_offset, first.text) == (0, 0, "xxx")
    other = harness.connect()
    harness.send(other, request("a", stream=True, output_token_ids=[0, 1, 2]))
    assert harness.receive_reply(other).token_ids == [0, 1, 2]
    harness.send_tokens("a", 2, 4, finish_reason="stop")
    assert harness.receive_reply(other).token_ids == [3]
    assert harness.receive_reply(other).token_ids == [0, 1, 2, 3]


def test_the_tokenizer_tells_how_long_a_prompt_is(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", prompt="x" * 400)
    assert harness.gateway.default.totals.num_waiting_tokens == 100
    harness.tokenize()
    assert harness.gateway.default.totals.num_waiting_tokens == 7
    harness.send(client, AbortRequest(request_id="a"))
    assert harness.receive_reply(client).usage.prompt_tokens == 7


def test_only_its_client_aborts_a_request(start_gateway: Start) -> None:
    """Until its connection is closed: then whoever knows the id may."""
    harness = start_gateway()
    client, other = harness.connect(), harness.connect()
    harness.submit(client, "a")
    harness.send(other, AbortRequest(request_id="a"))
    assert not harness.receive_reply(other).found
    assert harness.gateway.ledger.get("a")
    client.close()
    harness.run_until(lambda: len(harness.gateway.connections) == 1)
    harness.send(other, AbortRequest(request_id="a"))
    assert harness.receive_reply(other).found


def test_what_is_recovered_is_never_refused(start_gateway: Start) -> None:
    harness = start_gateway(max_num_seqs=2, max_waiting_requests=0, max_waiting_tokens=1)
    client = harness.connect()
    harness.submit(client, "a")
    harness.tokenize()
    harness.send_tokens("a", 0, 1)
    harness.submit(client, "b")
    harness.send(client, request("c"))
    refused = harness.receive_reply(client)
    assert (refused.code, refused.retry_after) == ("overloaded", 1.0)
    harness.tokenize()
    for epoch in (1, 2):
        harness.detokenizer.send(SchedulerStatus(epoch=epoch, ready=True))
    harness.run_until(lambda: [its.epoch for its in harness.gateway.default.router.statuses] == [2])
    again = [harness.tokenize() for _ in range(2)]
    assert {one.request_id: one.output_token_ids for one in again} == {"a": pack([0]), "b": b""}


def test_the_first_scheduler_may_be_the_second(start_gateway: Start) -> None:
    """A new gateway has given the requests to a scheduler that died before its first report."""
    harness = start_gateway()
    harness.submit(harness.connect(), "a")
    first = harness.tokenize()
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    harness.run_until(lambda: harness.gateway.default.router.statuses)
    again = harness.tokenize()
    assert (again.request_id, again.attempt > first.attempt) == ("a", True)
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=False))
    harness.run_until(lambda: not harness.gateway.default.router.statuses[0].ready)
    assert not harness.tokenizer.socket.poll(0)


def test_what_a_lost_tokenizer_had_goes_to_the_next(start_gateway: Start) -> None:
    """The scheduler had both attempts of a request: the first one is done."""
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", "ended")
    first = harness.tokenize()
    assert first.request_id == "a"
    again = harness.gateway.ledger.get("a")
    assert again
    harness.gateway.ledger.begin_attempt(again)
    harness.gateway.default.tokenizers.submit(again)
    harness.gateway.default.tokenizers.done(b"t", ("a", first.attempt))
    harness.send(client, AbortRequest(request_id="ended"))
    assert harness.receive_reply(client).request_id == "ended"
    harness.tokenizer.send(Goodbye())
    harness.run_until(lambda: not len(harness.gateway.default.tokenizers.peers))
    assert list(harness.gateway.default.tokenizers.unassigned) == [again]


def test_what_a_lost_tokenizer_had_passed_on_begins_again(start_gateway: Start) -> None:
    """A request may still be at the tokenizer; none restarts once a token has come."""
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "begun", "silent")
    attempts = {task.request_id: task.attempt for task in (harness.tokenize(), harness.tokenize())}
    harness.send_tokens("begun", 0, 1)
    harness.tokenizer.send(Goodbye())
    harness.run_until(lambda: not len(harness.gateway.default.tokenizers.peers))
    for request_id, attempt in attempts.items():
        entry = harness.gateway.ledger.get(request_id)
        assert (entry.attempt == attempt) == (request_id == "begun")
    harness.tokenizer.send(Heartbeat("tokenizer.1"))
    harness.run_until(lambda: len(harness.gateway.default.tokenizers.peers))
    again = harness.tokenize()
    assert (again.request_id, again.attempt > attempts["silent"]) == ("silent", True)


def test_a_scheduler_that_may_have_missed_something_is_told_all_again(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "open")
    before = harness.tokenize().attempt
    harness.scheduler_messages()
    harness.gateway.default.on_scheduler_reconnect(0)
    started = harness.scheduler_messages()[-1]
    assert before < started.first_attempt < harness.tokenize().attempt


@pytest.mark.parametrize(
    "untyped", [b"[" * 900 + b"]" * 900, b"1" * 30], ids=["deep", "an integer over 64 bits"]
)
@pytest.mark.parametrize("kind", [b"generate", b"tokenize"])
def test_what_can_not_be_sent_on_is_refused(
    start_gateway: Start, untyped: bytes, kind: bytes
) -> None:
    """Or a new scheduler would not get the requests of others."""
    harness = start_gateway()
    client, hostile = harness.connect(), harness.connect()
    harness.submit(client, "a")
    hostile.send(
        b'{"type": "%s", "prompt": "x", "chat_template_kwargs": {"a": %s}}' % (kind, untyped)
    )
    assert harness.receive_reply(hostile, JSON).code == "invalid"
    first = harness.tokenize()
    harness.submit(client, "b")
    harness.tokenize()
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    harness.run_until(lambda: harness.gateway.default.router.statuses)
    again = [harness.tokenize() for _ in range(2)]
    assert [task.request_id for task in again] == ["a", "b"]
    assert again[0].attempt > first.attempt


@pytest.mark.parametrize("event", ["a new scheduler", "a lost tokenizer", "a delta"])
def test_an_entry_that_raises_is_failed_alone(
    start_gateway: Start, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", "bad", "c", chat_template_kwargs={"x": 1})
    for _ in range(3):
        harness.tokenize()
    bad = harness.gateway.ledger.get("bad")
    assert bad
    bad.frame = b""
    if event == "a delta":
        deltas = [
            TextDelta(
                request_id=name,
                token_offset=0 if name != "bad" else 5,  # a gap: the request is sent again
                char_offset=0,
                token_ids=[1],
                text="x",
                attempt=harness.gateway.ledger.get(name).attempt,  # type: ignore[union-attr]
            )
            for name in ("a", "bad", "c")
        ]
        harness.detokenizer.send(TextDeltas(deltas))
    elif event == "a new scheduler":
        harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    else:
        harness.tokenizer.send(Goodbye())
        harness.tokenizer.send(Heartbeat("tokenizer.1"))
    error = harness.receive_reply(client)
    assert (error.code, error.request_id) == ("failed", "bad")
    assert "request bad raised and is failed" in caplog.text
    if event == "a delta":
        harness.run_until(lambda: harness.gateway.ledger.get("c").token_ids)  # type: ignore[union-attr]
    else:
        assert [harness.tokenize().request_id for _ in range(2)] == ["a", "c"]
    assert harness.gateway.ledger.get("bad") is None


def test_a_defect_at_one_entry_ends_no_loop_over_all(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", "bad", "c")
    for _ in range(3):
        harness.tokenize()
    ledger = harness.gateway.ledger
    begin = ledger.begin_attempt

    def begin_or_raise(entry: Request) -> None:
        if entry.request_id == "bad":
            raise ValueError(entry.request_id)
        begin(entry)

    monkeypatch.setattr(ledger, "begin_attempt", begin_or_raise)
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    error = harness.receive_reply(client)
    assert (error.code, error.request_id) == ("failed", "bad")
    assert [harness.tokenize().request_id for _ in range(2)] == ["a", "c"]


@pytest.mark.slow
def test_nothing_is_left_of_ten_thousand_requests(start_gateway: Start) -> None:
    """Requests are aborted, finished, timed out, or left by their clients.

    Tokenizers do all, half or nothing of their work and leave.
    """
    harness = start_gateway(max_waiting_requests=2000)
    rng = Random(1)
    for turn in range(100):
        client = harness.connect()
        names = [f"{turn}.{number}" for number in range(100)]
        harness.submit(client, *names, stream=rng.random() < 0.5, timeout=9.0)
        for _ in range((0, 100, 50)[turn % 3]):
            harness.tokenize()
        for name in names[:60]:
            if rng.random() < 0.5:
                harness.send_tokens(name, 0, 2)
            if rng.random() < 0.2:
                harness.send_tokens(name, 0, 3, finish_reason="stop")
        for name in names[20:80]:
            if rng.random() < 0.3:
                harness.send(client, AbortRequest(request_id=name))
        for timer in rng.sample(harness.timers, 10):
            timer.fire()
        harness.tokenizer.send(Goodbye())
        harness.run_until(lambda: not len(harness.gateway.default.tokenizers.peers))
        while harness.tokenizer.socket.poll(0):
            harness.tokenizer.socket.recv()
        client.close()
        harness.run_until(lambda: len(harness.gateway.connections) == 0)
        harness.run_heartbeats(2)
        assert harness.is_empty()
        assert harness.scheduler_messages()
