"""Requests that continue in another replica: the gateway's messages."""

from collections.abc import Callable
from typing import Any

from penstock.protocol.messages.client import StatusRequest, TextDelta
from penstock.protocol.messages.detokenizer import TextDeltas
from penstock.protocol.messages.scheduler import GatewayStarted, ReleaseRequest
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.messages.tokenizer import TokenizeDone
from tests.services.gateway.conftest import Stage

Start = Callable[..., Stage]


def report(one: Stage, replica: int, runs: bool = True, **fields: Any) -> None:
    """Send a scheduler's report."""
    status = SchedulerStatus(
        epoch=1, ready=runs, workers_ready=runs, replica=replica, num_steps=one.reports, **fields
    )
    one.reports += 1
    one.detokenizer.send(status)
    one.work_until(lambda: status in one.gateway.router.statuses)


def supervise(one: Stage, *names: str) -> None:
    """Send the supervisor's report of the processes that run."""
    processes = [ProcessStatus(name=name, pid=5, uptime=1.0, restarts=0) for name in names]
    one.detokenizer.send(SupervisorReport(processes))
    one.work_until(lambda: one.gateway.processes == processes)


def releases(one: Stage, replica: int) -> list[tuple[str, int]]:
    heard = one.told_scheduler(replica)
    return [(its.request_id, its.attempt) for its in heard if isinstance(its, ReleaseRequest)]


def test_what_a_replica_without_a_scheduler_has_goes_on_at_once(stage: Start) -> None:
    one = stage(dp=2)
    for replica in (0, 1):
        report(one, replica)
    one.open(one.connect(), "a")
    assert one.tokenize().replica == 0
    supervise(one, "gateway.1", "scheduler.1", "scheduler.2")
    supervise(one, "gateway.1", "scheduler.2")
    assert one.tokenize().replica == 1
    assert not one.gateway.is_ready
    supervise(one, "gateway.1", "scheduler.1", "scheduler.2")
    assert not one.gateway.is_ready, "the new scheduler has said nothing"
    report(one, 0)
    assert one.gateway.is_ready


def test_what_a_lost_replica_has_is_released_there_and_goes_on(stage: Start) -> None:
    """The old attempt is released again for every sign that it still runs."""
    one = stage(dp=2)
    assert [type(one.told_scheduler(n)[0]) for n in (0, 1)] == [GatewayStarted] * 2
    for replica in (0, 1):
        report(one, replica)
    client = one.connect()
    one.open(client, "a", stream=True)
    first = one.tokenize()
    assert first.replica == 0
    one.generate("a", 0, 3)
    assert one.hear(client).token_ids == [0, 1, 2]
    report(one, 0, runs=False, num_deaths={"a": 1})
    again = one.tokenize()
    assert (again.replica, again.output_token_ids, again.num_deaths) == (1, [0, 1, 2], 1)
    assert releases(one, 0) == [("a", first.attempt)]
    late = TextDelta(
        request_id="a",
        token_offset=3,
        char_offset=3,
        token_ids=[9],
        text="y",
        attempt=first.attempt,
    )
    one.detokenizer.send(TextDeltas([late]))
    one.tokenizer.send(TokenizeDone("a", first.attempt, 8))
    one.work_until(lambda: one.gateway.ledger.get("a").num_prompt_tokens == 8)  # type: ignore
    one.generate("a", 3, 4)
    assert one.gateway.ledger.get("a").num_deaths == 0  # type: ignore[union-attr]
    assert one.hear(client).token_ids == [3]
    one.generate("a", 4, 5, finish_reason="stop")
    assert releases(one, 0) == [("a", first.attempt)] * 2
    assert releases(one, 1) == [("a", again.attempt)], "it is answered"
    assert one.hear(client).token_ids == [4]
    assert one.hear(client).token_ids == [0, 1, 2, 3, 4]
    assert one.is_empty()
    assert not any(its.entries for its in one.gateway.router._all)


def test_a_fresh_status_is_of_every_replica_that_reports(stage: Start) -> None:
    one = stage(dp=2)
    for replica in (0, 1):
        report(one, replica)
    client = one.connect()
    one.ask(client, StatusRequest(fresh=True))
    one.work_until(lambda: one.gateway.status_queries.for_report)
    report(one, 0)
    report(one, 0)
    assert one.gateway.status_queries.for_report
    report(one, 1)
    assert [its.num_steps for its in one.hear(client).schedulers] == [3, 4]
    one.ask(client, StatusRequest(fresh=True))
    one.work_until(lambda: one.gateway.status_queries.for_report)
    for _ in range(11):
        one.gateway.router.on_heartbeat()
    report(one, 0)
    assert len(one.hear(client).schedulers) == 2, "of the silent one what it said last"
