"""Requests that continue in another replica: the gateway's messages."""

from collections.abc import Callable
from typing import Any

from penstock.protocol.messages.client import StatusRequest, TextDelta
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import (
    GatewayStarted,
    ReleaseRequest,
    TextDeltas,
    TokenizeDone,
)
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from tests.services.gateway.conftest import GatewayHarness

Start = Callable[..., GatewayHarness]


def report(harness: GatewayHarness, replica: int, runs: bool = True, **fields: Any) -> None:
    """Send a scheduler's report."""
    status = SchedulerStatus(
        epoch=1,
        ready=runs,
        workers_ready=runs,
        replica=replica,
        num_steps=harness.reports,
        **fields,
    )
    harness.reports += 1
    harness.detokenizer.send(status)
    harness.run_until(lambda: status in harness.gateway.default.router.statuses)


def supervise(harness: GatewayHarness, *names: str, uptime: float = 1.0) -> None:
    """Send the supervisor's report of the processes that run."""
    processes = [ProcessStatus(name=name, pid=5, uptime=uptime, restarts=0) for name in names]
    harness.detokenizer.send(SupervisorReport(processes))
    harness.run_until(lambda: harness.gateway.status.processes == processes)


def releases(harness: GatewayHarness, replica: int) -> list[tuple[str, int]]:
    messages = harness.scheduler_messages(replica)
    return [(its.request_id, its.attempt) for its in messages if isinstance(its, ReleaseRequest)]


def test_what_a_replica_without_a_scheduler_has_goes_on_at_once(start_gateway: Start) -> None:
    harness = start_gateway(dp=2)
    for replica in (0, 1):
        report(harness, replica)
    harness.submit(harness.connect(), "a")
    harness.tokenize()
    assert harness.replica == 0
    supervise(harness, "gateway.1", "scheduler.1", "scheduler.2")
    for uptime in (1.0, 1.5):  # a restart takes less
        supervise(harness, "gateway.1", "scheduler.2", uptime=uptime)
    harness.tokenize()
    assert harness.replica == 1
    assert not harness.gateway.status.is_ready()
    supervise(harness, "gateway.1", "scheduler.1", "scheduler.2")
    assert not harness.gateway.status.is_ready(), "the new scheduler has said nothing"
    report(harness, 0)
    assert harness.gateway.status.is_ready()


def test_what_a_lost_replica_has_is_released_there_and_goes_on(start_gateway: Start) -> None:
    """The old attempt is released again for every sign that it still runs."""
    harness = start_gateway(dp=2)
    assert [type(harness.scheduler_messages(n)[0]) for n in (0, 1)] == [GatewayStarted] * 2
    for replica in (0, 1):
        report(harness, replica)
    client = harness.connect()
    harness.submit(client, "a", stream=True)
    first = harness.tokenize()
    assert harness.replica == 0
    harness.send_tokens("a", 0, 3)
    assert harness.receive_reply(client).token_ids == [0, 1, 2]
    report(harness, 0, runs=False, num_deaths={"a": 1})
    again = harness.tokenize()
    assert (harness.replica, again.output_token_ids, again.num_deaths) == (1, pack([0, 1, 2]), 1)
    assert releases(harness, 0) == [("a", first.attempt)]
    late = TextDelta(
        request_id="a",
        token_offset=3,
        char_offset=3,
        token_ids=[9],
        text="y",
        attempt=first.attempt,
    )
    harness.detokenizer.send(TextDeltas([late]))
    harness.tokenizer.send(TokenizeDone("a", first.attempt, 8))
    harness.run_until(lambda: harness.gateway.ledger.get("a").num_prompt_tokens == 8)  # type: ignore
    harness.send_tokens("a", 3, 4)
    assert harness.gateway.ledger.get("a").num_deaths == 0  # type: ignore[union-attr]
    assert harness.receive_reply(client).token_ids == [3]
    harness.send_tokens("a", 4, 5, finish_reason="stop")
    assert releases(harness, 0) == [("a", first.attempt)] * 2
    assert releases(harness, 1) == [("a", again.attempt)], "it is answered"
    assert harness.receive_reply(client).token_ids == [4]
    assert harness.receive_reply(client).token_ids == [0, 1, 2, 3, 4]
    assert harness.is_empty()
    assert not any(its.requests for its in harness.gateway.default.router._replicas)


def test_a_fresh_status_is_of_every_replica_that_reports(start_gateway: Start) -> None:
    harness = start_gateway(dp=2)
    for replica in (0, 1):
        report(harness, replica)
    client = harness.connect()
    harness.send(client, StatusRequest(fresh=True))
    harness.run_until(lambda: harness.gateway.status.for_report)
    report(harness, 0)
    report(harness, 0)
    assert harness.gateway.status.for_report
    report(harness, 1)
    assert [its.num_steps for its in harness.receive_reply(client).schedulers] == [3, 4]
    harness.send(client, StatusRequest(fresh=True))
    harness.run_until(lambda: harness.gateway.status.for_report)
    for _ in range(11):
        harness.gateway.default.router.on_heartbeat()
    report(harness, 0)
    assert len(harness.receive_reply(client).schedulers) == 2, "of the silent one what it said last"
