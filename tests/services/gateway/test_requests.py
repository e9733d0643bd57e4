"""The life of requests: time limits, lost processes, poison, the end, and nothing left of any."""

import logging
import re
from random import Random
from time import monotonic
from typing import Any

import pytest

from penstock.protocol.messages.client import (
    AbortRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    StatusRequest,
)
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import (
    GatewayStarted,
    Goodbye,
    Heartbeat,
    RequestFailed,
    TextDeltas,
    TokenizeDone,
)
from penstock.protocol.messages.status import ProcessStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.protocol.transport.process import first_number
from penstock.services.gateway.process import CLOSE_GRACE_SECONDS
from penstock.services.gateway.request import Request
from penstock.services.gateway.tokenizers import digest
from tests.services.gateway.conftest import PROMPT, Harness, Socket, Start, delta, request

# ---- limits, and what a client has -------------------------------------------------------------


def test_a_time_limit_while_there_is_no_tokenizer(harness: Harness, client: Socket) -> None:
    harness.submit(client, "a", timeout=2.5)
    harness.submit(client, "b")
    (timer,) = harness.timers
    assert timer.seconds == 2.5
    timer.fire()
    reply = harness.receive_reply(client)
    assert (reply.request_id, reply.finish_reason, reply.token_ids) == ("a", "abort", [])
    assert [request_id for request_id, _ in harness.releases()] == ["a"]
    assert harness.tokenize().request_id == "b"


@pytest.mark.parametrize("ends", ["abort", "stop"])
def test_a_time_limit_while_it_runs(harness: Harness, client: Socket, ends: str) -> None:
    harness.submit(client, "a", timeout=2.5)
    harness.tokenize()
    harness.send_tokens("a", 0, 2)
    if ends == "abort":
        harness.timers[0].fire()
    else:
        harness.send_tokens("a", 2, 2, finish_reason=ends)
    reply = harness.receive_reply(client)
    assert (reply.finish_reason, reply.token_ids, reply.text) == (ends, [0, 1], "xx")
    assert reply.usage.prompt_tokens == len(PROMPT)
    assert harness.is_empty()


def test_a_request_goes_on_behind_what_its_client_has(harness: Harness, client: Socket) -> None:
    """Every process except the client may be new."""
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


def test_the_tokenizer_tells_how_long_a_prompt_is(harness: Harness, client: Socket) -> None:
    harness.submit(client, "a", prompt="x" * 400)
    assert harness.model.totals.num_waiting_tokens == 100
    harness.tokenize()
    assert harness.model.totals.num_waiting_tokens == 7
    harness.send(client, AbortRequest(request_id="a"))
    assert harness.receive_reply(client).usage.prompt_tokens == 7


def test_only_its_client_aborts_a_request(harness: Harness, client: Socket) -> None:
    """Until its connection is closed: then whoever knows the id may."""
    other = harness.connect()
    harness.submit(client, "a")
    harness.send(other, AbortRequest(request_id="a"))
    assert not harness.receive_reply(other).found
    assert harness.get("a")
    harness.leave(client)
    harness.send(other, AbortRequest(request_id="a"))
    assert harness.receive_reply(other).found


# ---- a process is lost -------------------------------------------------------------------------


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
        harness.report(epoch=epoch)
    again = [harness.tokenize() for _ in range(2)]
    assert {task.request_id: task.output_token_ids for task in again} == {"a": pack([0]), "b": b""}


def test_attempts_begin_where_the_gateway_does(harness: Harness, client: Socket) -> None:
    """The first scheduler may be the second: the first one died before its first report."""
    (started,) = harness.scheduler_messages()
    assert started == GatewayStarted(first_number(3))
    harness.submit(client, "a")
    first = harness.tokenize()
    assert first.attempt == started.first_attempt
    harness.report()
    again = harness.tokenize()
    assert (again.request_id, again.attempt > first.attempt) == ("a", True)
    harness.report(runs=False)
    assert not harness.tokenizer.socket.poll(0)


def test_what_a_lost_tokenizer_had_goes_to_the_next(harness: Harness, client: Socket) -> None:
    """The scheduler had both attempts of a request: the first one is done."""
    harness.submit(client, "a", "ended")
    first = harness.tokenize()
    assert first.request_id == "a"
    again = harness.get("a")
    harness.ledger.begin_attempt(again)
    harness.model.tokenizers.submit(again)
    harness.model.tokenizers.done(b"t", ("a", first.attempt))
    harness.send(client, AbortRequest(request_id="ended"))
    assert harness.receive_reply(client).request_id == "ended"
    harness.lose_tokenizer()
    assert list(harness.model.tokenizers.unassigned) == [again]


def test_what_a_lost_tokenizer_had_passed_on_begins_again(harness: Harness, client: Socket) -> None:
    """A request may still be at the tokenizer; none restarts once a token has come."""
    harness.submit(client, "begun", "silent")
    attempts = {task.request_id: task.attempt for task in (harness.tokenize(), harness.tokenize())}
    harness.send_tokens("begun", 0, 1)
    harness.lose_tokenizer()
    assert harness.get("begun").attempt == attempts["begun"]
    again = harness.tokenize()
    assert (again.request_id, again.attempt > attempts["silent"]) == ("silent", True)


def test_a_scheduler_that_may_have_missed_something_is_told_all_again(
    harness: Harness, client: Socket
) -> None:
    harness.submit(client, "open")
    before = harness.tokenize().attempt
    harness.scheduler_messages()
    harness.model.on_scheduler_reconnect(0)
    started = harness.scheduler_messages()[-1]
    assert before < started.first_attempt < harness.tokenize().attempt


def supervise(harness: Harness, *names: str, uptime: float = 1.0) -> None:
    """Send the supervisor's report of the processes that run."""
    processes = [ProcessStatus(name=name, pid=5, uptime=uptime, restarts=0) for name in names]
    harness.detokenizer.send(SupervisorReport(processes))
    harness.run_until(lambda: harness.status.processes == processes)


@pytest.fixture
def replicas(start_gateway: Start) -> Harness:
    """Return a gateway of two replicas that run."""
    harness = start_gateway(dp=2)
    assert [harness.scheduler_messages(n) for n in (0, 1)] == [[GatewayStarted(3 << 32)]] * 2
    for replica in (0, 1):
        harness.report(replica=replica)
    return harness


def test_what_a_replica_without_a_scheduler_has_goes_on_at_once(replicas: Harness) -> None:
    replicas.submit(replicas.connect(), "a")
    replicas.tokenize()
    assert replicas.replica == 0
    supervise(replicas, "gateway.1", "scheduler.1", "scheduler.2")
    for uptime in (1.0, 1.5):  # a restart takes less
        supervise(replicas, "gateway.1", "scheduler.2", uptime=uptime)
    replicas.tokenize()
    assert replicas.replica == 1
    assert not replicas.status.is_ready()
    supervise(replicas, "gateway.1", "scheduler.1", "scheduler.2")
    assert not replicas.status.is_ready(), "the new scheduler has said nothing"
    replicas.report(replica=0)
    assert replicas.status.is_ready()


def test_what_a_lost_replica_has_is_released_there_and_goes_on(replicas: Harness) -> None:
    """The old attempt is released again for every sign that it still runs."""
    client = replicas.connect()
    replicas.submit(client, "a", stream=True)
    first = replicas.tokenize()
    assert replicas.replica == 0
    replicas.send_tokens("a", 0, 3)
    assert replicas.receive_reply(client).token_ids == [0, 1, 2]
    replicas.report(runs=False, replica=0, num_deaths={"a": 1})
    again = replicas.tokenize()
    assert (replicas.replica, again.output_token_ids, again.num_deaths) == (1, pack([0, 1, 2]), 1)
    assert replicas.releases(0) == [("a", first.attempt)]
    replicas.detokenizer.send(TextDeltas([delta(3, 9, attempt=first.attempt)]))
    replicas.tokenizer.send(TokenizeDone("a", first.attempt, 8))
    replicas.run_until(lambda: replicas.get("a").num_prompt_tokens == 8)
    replicas.send_tokens("a", 3, 4)
    assert replicas.get("a").num_deaths == 0
    assert replicas.receive_reply(client).token_ids == [3]
    replicas.send_tokens("a", 4, 5, finish_reason="stop")
    assert replicas.releases(0) == [("a", first.attempt)] * 2
    assert replicas.releases(1) == [("a", again.attempt)], "it is answered"
    assert replicas.receive_reply(client).token_ids == [4]
    assert replicas.receive_reply(client).token_ids == [0, 1, 2, 3, 4]
    assert replicas.is_empty()
    assert not replicas.model.router.requests


def test_a_fresh_status_is_of_every_replica_that_reports(replicas: Harness) -> None:
    client = replicas.connect()
    replicas.send(client, StatusRequest(fresh=True))
    replicas.run_until(lambda: replicas.status.for_report)
    for _ in range(2):
        replicas.report(replica=0)
        assert replicas.status.for_report
    replicas.report(replica=1)
    assert [its.num_steps for its in replicas.receive_reply(client).schedulers] == [3, 4]
    replicas.send(client, StatusRequest(fresh=True))
    replicas.run_until(lambda: replicas.status.for_report)
    for _ in range(MAX_MISSED_HEARTBEATS + 1):
        replicas.model.router.on_heartbeat()
    replicas.report(replica=0)
    assert len(replicas.receive_reply(client).schedulers) == 2, "also the silent one"


# ---- a request fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["a new scheduler", "a lost tokenizer", "a delta", "a defect"])
def test_a_request_that_raises_is_failed_alone(
    harness: Harness,
    client: Socket,
    event: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness.submit(client, "a", "bad", "c", chat_template_kwargs={"x": 1})
    for _ in range(3):
        harness.tokenize()
    begin = harness.ledger.begin_attempt

    def begin_or_raise(request: Request) -> None:
        if request.request_id == "bad":
            raise ValueError
        begin(request)

    if event == "a defect":
        monkeypatch.setattr(harness.ledger, "begin_attempt", begin_or_raise)
    else:
        harness.get("bad").frame = b""
    if event == "a delta":
        offsets = {"a": 0, "bad": 5, "c": 0}  # a gap: the request is sent again
        attempts = {name: harness.get(name).attempt for name in offsets}
        deltas = [delta(n, n + 1, name, attempt=attempts[name]) for name, n in offsets.items()]
        harness.detokenizer.send(TextDeltas(deltas))
    elif event == "a lost tokenizer":
        harness.tokenizer.send(Goodbye())
        harness.tokenizer.send(Heartbeat("tokenizer.1"))
    else:
        harness.report()
    error = harness.receive_reply(client)
    assert (error.code, error.request_id) == ("failed", "bad")
    assert "request bad raised and is failed" in caplog.text
    if event == "a delta":
        harness.run_until(lambda: harness.get("c").token_ids)
    else:
        assert [harness.tokenize().request_id for _ in range(2)] == ["a", "c"]
    assert harness.ledger.get("bad") is None


def fail(harness: Harness, request_id: str, is_poison: bool) -> None:
    """Send a scheduler's verdict on a request."""
    error = ErrorReply(code="failed", message="no")
    attempt = harness.get(request_id).attempt
    harness.detokenizer.send(RequestFailed(request_id, attempt, error, is_poison))


def test_poison_is_refused_and_others_are_not(harness: Harness, client: Socket) -> None:
    harness.submit(client, "poison", "twin", "runs")
    harness.submit(client, "other", temperature=0.5)
    for _ in range(4):
        harness.tokenize()
    harness.send_tokens("runs", 0, 1)
    fail(harness, "poison", is_poison=True)
    failed = [harness.receive_reply(client) for _ in range(2)]
    assert [(it.code, it.request_id) for it in failed] == [("failed", "poison"), ("failed", "twin")]
    assert harness.get("runs") and harness.get("other")
    harness.send(client, request("again", seed=7, stream=True, output_token_ids=[1]))
    refused = harness.receive_reply(client)
    assert (refused.code, refused.field) == ("failed", None)
    assert "it is not tried again" in refused.message
    harness.submit(client, "longer", prompt=[9, 9])


def test_what_fails_otherwise_may_be_sent_again(harness: Harness, client: Socket) -> None:
    harness.submit(client, "a")
    fail(harness, "a", is_poison=False)
    assert harness.receive_reply(client).code == "failed"
    harness.submit(client, "again")


def test_a_gateway_that_restarted_refuses_what_was_given_up_before(
    harness: Harness, client: Socket
) -> None:
    """Whichever replica it would go to: the supervisor remembers it."""
    gateway = ProcessStatus(name="gateway.1", pid=5, uptime=1.0, restarts=1)
    harness.detokenizer.send(SupervisorReport([gateway], poison=[digest(request("a"))]))
    harness.run_until(lambda: harness.status.processes)
    harness.send(client, request("again", seed=7))
    assert "it is not tried again" in harness.receive_reply(client).message
    harness.submit(client, "other", prompt=[9, 9])


# ---- a drain, for a gateway that was there and for one that was restarted ----------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that the gateway sends itself."""
    signals: list[int] = []
    monkeypatch.setattr("signal.raise_signal", signals.append)
    return signals


@pytest.fixture
def restarted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Return a gateway that has heard of the drain and nothing else yet."""
    with monkeypatch.context() as patch:
        patch.setattr(harness.model.router, "record_running", lambda _: None)  # none is lost
        harness.detokenizer.send(SupervisorReport([], draining=True))
        harness.run_until(lambda: harness.model.is_draining)
    return harness


def leases(harness: Harness, first_attempt: int, *unclaimed: str) -> None:
    """Send the scheduler's report of its requests."""
    harness.report(first_attempt=first_attempt, unclaimed=list(unclaimed))


def test_what_is_asked_for_again_is_finished_and_nothing_begun(
    restarted: Harness, client: Socket, ended: list[int]
) -> None:
    attempt = restarted.ledger.first_attempt
    leases(restarted, attempt - 1)  # to the gateway before: it says nothing about leases
    assert not ended
    leases(restarted, attempt, "a", "b")
    restarted.submit(client, "a")
    restarted.send(client, request("new"))
    assert restarted.receive_reply(client).code == "overloaded"
    restarted.submit(client, "continued", output_token_ids=[1])
    restarted.send(client, AbortRequest(request_id="continued"))
    assert restarted.receive_reply(client).finish_reason == "abort"
    assert restarted.receive_reply(client).found
    leases(restarted, attempt, "b")
    assert restarted.status.reply().schedulers[0].unclaimed == [], "other clients see no ids"
    restarted.send_tokens("a", 0, 5, finish_reason="stop")
    restarted.receive_reply(client)
    assert not ended
    leases(restarted, attempt)
    assert not ended  # the client may not have read its answer
    (timer,) = restarted.timers
    assert timer.seconds == CLOSE_GRACE_SECONDS
    timer.fire()
    assert ended
    assert restarted.status.reply().draining


def test_until_the_scheduler_is_heard_anyone_may_ask_by_an_id(
    restarted: Harness, client: Socket, ended: list[int]
) -> None:
    restarted.submit(client, "a")
    restarted.send_tokens("a", 0, 5, finish_reason="stop")
    restarted.receive_reply(client)
    assert not ended


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_scheduler_that_is_not_there_has_nothing_to_wait_for(
    restarted: Harness, ended: list[int], is_gone: bool
) -> None:
    if is_gone:
        for _ in range(2):
            restarted.model.router.record_running(())
    else:
        restarted.run_heartbeats(MAX_MISSED_HEARTBEATS + 1)
    restarted.run_once()
    assert ended


def test_a_drain_waits_for_queries(harness: Harness, client: Socket, ended: list[int]) -> None:
    query = DetokenizeRequest(token_ids=[1, 2])
    harness.ask(client, query)
    harness.model.is_draining = True
    harness.report()
    harness.send(client, query)
    assert harness.receive_reply(client).code == "overloaded"
    assert not (harness.timers or ended)
    harness.answer_query(DetokenizeReply(text=""))
    harness.receive_reply(client)
    harness.timers[-1].fire()
    assert ended


# ---- the log, and the span of a request --------------------------------------------------------


def test_requests_are_lines_at_debug_and_failures_at_info(
    harness: Harness, client: Socket, caplog: pytest.LogCaptureFixture
) -> None:
    """Without their text."""
    caplog.set_level(logging.DEBUG, "gateway")
    harness.submit(client, "a", "b")
    harness.send_tokens("a", 0, 4, finish_reason="stop", cached_tokens=3)
    assert harness.receive_reply(client).request_id == "a"
    harness.model.answer(harness.get("b"), ErrorReply(code="failed", message="secret"))
    harness.send(client, request("c", max_tokens=9999))
    assert [harness.receive_reply(client).code for _ in range(2)] == ["failed", "invalid"]
    name = harness.model.name
    shown = [(record.levelname, record.getMessage()) for record in caplog.records]
    (level, line), *others = [(level, line) for level, line in shown if "request" in line]
    expected = rf"request a of {name}: \d+ prompt tokens, 3 of them cached, 4 output tokens, stop, "
    assert re.fullmatch(rf"{expected}first token after \d+ ms, whole after \d+ ms", line)
    assert level == "DEBUG"
    assert others == [
        ("INFO", f"request b of {name} fails after 0 tokens: failed"),
        ("INFO", "a request is refused: invalid, field max_tokens"),
    ]


def test_each_request_is_a_root_span(
    harness: Harness, client: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def span(
        name: str, request_id: str, begin: float, attributes: dict[str, Any], **options: Any
    ) -> None:
        assert (name, options.pop("is_root"), options.pop("error")) == ("request", True, "")
        assert all(begin < moment < monotonic() for moment in options.get("events", {}).values())
        spans[request_id] = attributes, options

    monkeypatch.setattr(harness.model.tracer, "is_on", True)
    monkeypatch.setattr(harness.model.tracer, "span", span)
    harness.submit(client, "a", "b")
    harness.send_tokens("a", 0, 2)
    harness.report()  # a second attempt begins
    harness.send_tokens("a", 2, 3, cached_tokens=4, finish_reason="length")
    harness.send(client, AbortRequest(request_id="b"))
    for _ in range(3):
        harness.receive_reply(client)
    (of_first, options), (of_second, none) = spans["a"], spans["b"]
    assert of_first == {
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "penstock.cached_tokens": 4,
        "penstock.num_attempts": 2,
    }
    assert (list(options["events"]), none) == (["first token"], {})
    assert of_second["gen_ai.response.finish_reasons"] == ["abort"]


# ---- nothing is left ---------------------------------------------------------------------------


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
        harness.lose_tokenizer()
        while harness.tokenizer.socket.poll(0):
            harness.tokenizer.socket.recv()
        harness.leave(client)
        harness.run_heartbeats(2)
        assert harness.is_empty()
        assert harness.scheduler_messages()


def test_a_drain_waits_until_blocks_are_in_files(start_gateway: Start, ended: list[int]) -> None:
    """A report from before the end of the last request says nothing about its blocks."""
    harness = start_gateway(kv_offload_folder="folder")
    harness.report()
    harness.scheduler_messages()
    harness.model.is_draining = True
    harness.run_once()
    assert GatewayStarted(harness.ledger.first_attempt) in harness.scheduler_messages()
    harness.report(num_unsaved_blocks=3)
    assert not ended
    harness.report()
    assert ended
