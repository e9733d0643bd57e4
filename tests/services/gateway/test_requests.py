"""Time limits, tokenizers that are lost, overload, and nothing left of any request."""

from collections.abc import Callable
from random import Random

import pytest

from penstock.protocol.messages.client import AbortRequest, TextDelta
from penstock.protocol.messages.codec import JSON
from penstock.protocol.messages.detokenizer import TextDeltas
from penstock.protocol.messages.registration import Goodbye, Heartbeat
from penstock.protocol.messages.scheduler import ReleaseRequest
from penstock.protocol.messages.status import SchedulerStatus
from penstock.services.gateway.entry import Entry
from tests.services.gateway.conftest import PROMPT, Stage, request

Start = Callable[..., Stage]


def test_a_time_limit_while_there_is_no_tokenizer(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a", timeout=2.5)
    one.open(client, "b")
    (timer,) = one.timers
    assert timer.seconds == 2.5
    timer.fire()
    reply = one.hear(client)
    assert (reply.request_id, reply.finish_reason, reply.token_ids) == ("a", "abort", [])
    assert isinstance(one.told_scheduler()[-1], ReleaseRequest)
    assert one.tokenize().request_id == "b"


def test_a_time_limit_while_it_runs(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a", timeout=2.5)
    one.tokenize()
    one.generate("a", 0, 3)
    one.timers[0].fire()
    reply = one.hear(client)
    assert (reply.finish_reason, reply.token_ids, reply.text) == ("abort", [0, 1, 2], "xxx")
    assert reply.usage.prompt_tokens == len(PROMPT)
    assert one.is_empty()


def test_a_time_limit_ends_with_the_request(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a", timeout=2.5)
    one.tokenize()
    one.generate("a", 0, 3, finish_reason="stop")
    assert one.hear(client).finish_reason == "stop"
    assert one.is_empty()


def test_a_request_goes_on_behind_what_its_client_has(stage: Start) -> None:
    """Every process except the client may be new."""
    one = stage()
    client = one.connect()
    one.open(client, "a", stream=True, output_token_ids=[0, 1])
    assert one.tokenize().output_token_ids == [0, 1]
    one.generate("a", 0, 3)
    first = one.hear(client)
    assert (first.token_offset, first.char_offset, first.text) == (0, 0, "xxx")
    other = one.connect()
    one.ask(other, request("a", stream=True, output_token_ids=[0, 1, 2]))
    assert one.hear(other).token_ids == [0, 1, 2]
    one.generate("a", 2, 4, finish_reason="stop")
    assert one.hear(other).token_ids == [3]
    assert one.hear(other).token_ids == [0, 1, 2, 3]


def test_the_tokenizer_tells_how_long_a_prompt_is(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a", prompt="x" * 400)
    assert one.gateway.ledger.totals.num_waiting_tokens == 100
    one.tokenize()
    assert one.gateway.ledger.totals.num_waiting_tokens == 7
    one.ask(client, AbortRequest(request_id="a"))
    assert one.hear(client).usage.prompt_tokens == 7


def test_what_is_recovered_is_never_refused(stage: Start) -> None:
    one = stage(max_num_seqs=2, max_waiting_requests=0, max_waiting_tokens=1)
    client = one.connect()
    one.open(client, "a")
    one.tokenize()
    one.generate("a", 0, 1)
    one.open(client, "b")
    one.ask(client, request("c"))
    refused = one.hear(client)
    assert (refused.code, refused.retry_after) == ("overloaded", 1.0)
    one.tokenize()
    for epoch in (1, 2):
        one.detokenizer.send(SchedulerStatus(epoch=epoch, ready=True))
    one.work_until(lambda: [its.epoch for its in one.gateway.router.statuses] == [2])
    again = [one.tokenize() for _ in range(2)]
    assert {task.request_id: task.output_token_ids for task in again} == {"a": [0], "b": []}


def test_the_first_scheduler_may_be_the_second(stage: Start) -> None:
    """A new gateway has given the requests to a scheduler that died before its first report."""
    one = stage()
    one.open(one.connect(), "a")
    first = one.tokenize()
    one.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    one.work_until(lambda: one.gateway.router.statuses)
    again = one.tokenize()
    assert (again.request_id, again.attempt > first.attempt) == ("a", True)
    one.detokenizer.send(SchedulerStatus(epoch=1, ready=False))
    one.work_until(lambda: not one.gateway.router.statuses[0].ready)
    assert not one.tokenizer.socket.poll(0)


def test_what_a_lost_tokenizer_had_goes_to_the_next(stage: Start) -> None:
    """The scheduler had both attempts of a request: the first one is done."""
    one = stage()
    client = one.connect()
    one.open(client, "a", "ended")
    first = one.tokenize()
    assert first.request_id == "a"
    again = one.gateway.ledger.get("a")
    assert again
    one.gateway.ledger.begin_attempt(again)
    one.gateway.tokenizers.submit(again)
    one.gateway.tokenizers.done(b"t", ("a", first.attempt))
    one.ask(client, AbortRequest(request_id="ended"))
    assert one.hear(client).request_id == "ended"
    one.tokenizer.send(Goodbye())
    one.work_until(lambda: not len(one.gateway.tokenizers.peers))
    entry = one.gateway.ledger.get("a")
    assert list(one.gateway.tokenizers.unassigned) == [entry]


def test_what_a_lost_tokenizer_had_passed_on_begins_again(stage: Start) -> None:
    """A request may still be at the tokenizer; none restarts once a token has come."""
    one = stage()
    client = one.connect()
    one.open(client, "begun", "silent")
    attempts = {task.request_id: task.attempt for task in (one.tokenize(), one.tokenize())}
    one.generate("begun", 0, 1)
    one.tokenizer.send(Goodbye())
    one.work_until(lambda: not len(one.gateway.tokenizers.peers))
    for request_id, attempt in attempts.items():
        entry = one.gateway.ledger.get(request_id)
        assert (entry.attempt == attempt) == (request_id == "begun")
    one.tokenizer.send(Heartbeat("tokenizer.1"))
    one.work_until(lambda: len(one.gateway.tokenizers.peers))
    again = one.tokenize()
    assert (again.request_id, again.attempt > attempts["silent"]) == ("silent", True)


def test_a_scheduler_that_may_have_missed_something_is_told_all_again(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "open")
    before = one.tokenize().attempt
    one.told_scheduler()
    one.gateway.on_return(0)
    started = one.told_scheduler()[-1]
    assert before < started.first_attempt < one.tokenize().attempt


@pytest.mark.parametrize(
    "untyped", [b"[" * 900 + b"]" * 900, b"1" * 30], ids=["deep", "an integer over 64 bits"]
)
@pytest.mark.parametrize("kind", [b"generate", b"tokenize"])
def test_what_can_not_be_sent_on_is_refused(stage: Start, untyped: bytes, kind: bytes) -> None:
    """Or a new scheduler would not get the requests of others."""
    one = stage()
    client, hostile = one.connect(), one.connect()
    one.open(client, "a")
    hostile.send(
        b'{"type": "%s", "prompt": "x", "chat_template_kwargs": {"a": %s}}' % (kind, untyped)
    )
    assert one.hear(hostile, JSON).code == "invalid"
    first = one.tokenize()
    one.open(client, "b")
    one.tokenize()
    one.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    one.work_until(lambda: one.gateway.router.statuses)
    again = [one.tokenize() for _ in range(2)]
    assert [task.request_id for task in again] == ["a", "b"]
    assert again[0].attempt > first.attempt


@pytest.mark.parametrize("event", ["a new scheduler", "a lost tokenizer", "a delta"])
def test_an_entry_that_raises_is_failed_alone(
    stage: Start, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a", "bad", "c", chat_template_kwargs={"x": 1})
    for _ in range(3):
        one.tokenize()
    bad = one.gateway.ledger.get("bad")
    assert bad
    bad.request.chat_template_kwargs["x"] = 1 << 70
    if event == "a delta":
        deltas = [
            TextDelta(
                request_id=name,
                token_offset=0 if name != "bad" else 5,  # a gap: the request is sent again
                char_offset=0,
                token_ids=[1],
                text="x",
                attempt=one.gateway.ledger.get(name).attempt,  # type: ignore[union-attr]
            )
            for name in ("a", "bad", "c")
        ]
        one.detokenizer.send(TextDeltas(deltas))
    elif event == "a new scheduler":
        one.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    else:
        one.tokenizer.send(Goodbye())
        one.tokenizer.send(Heartbeat("tokenizer.1"))
    error = one.hear(client)
    assert (error.code, error.request_id) == ("failed", "bad")
    assert "request bad raised and is failed" in caplog.text
    if event == "a delta":
        one.work_until(lambda: one.gateway.ledger.get("c").token_ids)  # type: ignore[union-attr]
    else:
        assert [one.tokenize().request_id for _ in range(2)] == ["a", "c"]
    assert one.gateway.ledger.get("bad") is None


def test_a_defect_at_one_entry_ends_no_loop_over_all(
    stage: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a", "bad", "c")
    for _ in range(3):
        one.tokenize()
    ledger = one.gateway.ledger
    begin = ledger.begin_attempt

    def begin_or_raise(entry: Entry) -> None:
        if entry.request_id == "bad":
            raise ValueError(entry.request_id)
        begin(entry)

    monkeypatch.setattr(ledger, "begin_attempt", begin_or_raise)
    one.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    error = one.hear(client)
    assert (error.code, error.request_id) == ("failed", "bad")
    assert [one.tokenize().request_id for _ in range(2)] == ["a", "c"]


@pytest.mark.slow
def test_nothing_is_left_of_ten_thousand_requests(stage: Start) -> None:
    """Requests are aborted, finished, timed out, or left by their clients.

    Tokenizers do all, half or nothing of their work and leave.
    """
    one = stage(max_waiting_requests=2000)
    rng = Random(1)
    for turn in range(100):
        client = one.connect()
        names = [f"{turn}.{number}" for number in range(100)]
        one.open(client, *names, stream=rng.random() < 0.5, timeout=9.0)
        for _ in range((0, 100, 50)[turn % 3]):
            one.tokenize()
        for name in names[:60]:
            if rng.random() < 0.5:
                one.generate(name, 0, 2)
            if rng.random() < 0.2:
                one.generate(name, 0, 3, finish_reason="stop")
        for name in names[20:80]:
            if rng.random() < 0.3:
                one.ask(client, AbortRequest(request_id=name))
        for timer in rng.sample(one.timers, 10):
            timer.fire()
        one.tokenizer.send(Goodbye())
        one.work_until(lambda: not len(one.gateway.tokenizers.peers))
        while one.tokenizer.socket.poll(0):
            one.tokenizer.socket.recv()
        client.close()
        one.work_until(lambda: len(one.gateway.connections) == 0)
        one.heartbeats(2)
        assert one.is_empty()
        assert one.told_scheduler()
