"""The end of a pipeline, for a gateway that was there and for one that was restarted."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.messages.client import AbortRequest
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.services.gateway.process import CLOSE_GRACE_SECONDS
from tests.services.gateway.conftest import GatewayHarness, request

Start = Callable[..., GatewayHarness]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that the gateway sends itself."""
    signals: list[int] = []
    monkeypatch.setattr("signal.raise_signal", signals.append)
    return signals


def restarted(start_gateway: Start) -> GatewayHarness:
    """Return a gateway that has heard of the drain and nothing else yet."""
    harness = start_gateway()
    harness.detokenizer.send(SupervisorReport([], draining=True))
    harness.gateway.default.router.record_running = lambda _: None  # type: ignore[method-assign]  # none is lost
    harness.run_until(lambda: harness.gateway.default.is_draining)
    return harness


def report(harness: GatewayHarness, first_attempt: int, *unclaimed: str) -> None:
    """Send the scheduler's report of its requests."""
    status = SchedulerStatus(
        epoch=1, ready=True, first_attempt=first_attempt, unclaimed=list(unclaimed)
    )
    harness.detokenizer.send(status)
    harness.run_until(lambda: harness.gateway.default.router._replicas[0].status == status)


def code(harness: GatewayHarness, client: Any) -> str:
    return str(harness.receive_reply(client).code)


def test_what_is_asked_for_again_is_finished_and_nothing_begun(
    start_gateway: Start, ended: list[int]
) -> None:
    harness = restarted(start_gateway)
    client, attempt = harness.connect(), harness.gateway.ledger.first_attempt
    report(harness, attempt - 1)  # to the gateway before: it says nothing about leases
    assert not ended
    report(harness, attempt, "a", "b")
    harness.submit(client, "a")
    harness.send(client, request("new"))
    assert code(harness, client) == "overloaded"
    harness.submit(client, "rest", output_token_ids=[1])
    harness.send(client, AbortRequest(request_id="rest"))
    assert harness.receive_reply(client).finish_reason == "abort"
    assert harness.receive_reply(client).found
    report(harness, attempt, "b")
    harness.send_tokens("a", 0, 5, finish_reason="stop")
    harness.receive_reply(client)
    assert not ended
    report(harness, attempt)
    assert not ended  # the client may not have read its answer
    (timer,) = harness.timers
    assert timer.seconds == CLOSE_GRACE_SECONDS
    timer.fire()
    assert ended
    assert harness.gateway.status.reply().draining


def test_until_the_scheduler_is_heard_anyone_may_ask_by_an_id(
    start_gateway: Start, ended: list[int]
) -> None:
    harness = restarted(start_gateway)
    client = harness.connect()
    harness.submit(client, "a")
    harness.send_tokens("a", 0, 5, finish_reason="stop")
    harness.receive_reply(client)
    assert not ended


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_scheduler_that_is_not_there_has_nothing_to_wait_for(
    start_gateway: Start, ended: list[int], is_gone: bool
) -> None:
    harness = restarted(start_gateway)
    if is_gone:
        for _ in range(2):
            type(harness.gateway.default.router).record_running(harness.gateway.default.router, ())
    else:
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            harness.gateway.on_heartbeat()
    harness.run_once()
    assert ended


def test_other_clients_do_not_see_the_ids(start_gateway: Start) -> None:
    harness = start_gateway()
    report(harness, harness.gateway.ledger.first_attempt, "secret")
    assert harness.gateway.status.reply().schedulers[0].unclaimed == []
