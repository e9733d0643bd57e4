"""The end of a pipeline, for a gateway that was there and for one that was restarted."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.services.gateway.process import LAST_WORDS
from tests.services.gateway.conftest import Stage, request

Start = Callable[..., Stage]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that the gateway sends itself."""
    signals: list[int] = []
    monkeypatch.setattr("signal.raise_signal", signals.append)
    return signals


def restarted(stage: Start) -> Stage:
    """Return a gateway that has heard of the drain and nothing else yet."""
    one = stage()
    one.detokenizer.send(SupervisorReport([], draining=True))
    one.gateway.router.take_running = lambda _: None  # type: ignore[method-assign]  # none is lost
    one.work_until(lambda: one.gateway.requests.is_draining)
    return one


def report(one: Stage, first_attempt: int, *unclaimed: str) -> None:
    """Send the scheduler's report of its requests."""
    status = SchedulerStatus(
        epoch=1, ready=True, first_attempt=first_attempt, unclaimed=list(unclaimed)
    )
    one.detokenizer.send(status)
    one.work_until(lambda: one.gateway.router._all[0].status == status)


def code(one: Stage, client: Any) -> str:
    return str(one.hear(client).code)


def test_what_is_asked_for_again_is_finished_and_nothing_begun(
    stage: Start, ended: list[int]
) -> None:
    one = restarted(stage)
    client, attempt = one.connect(), one.gateway.ledger.first_attempt
    report(one, attempt - 1)  # to the gateway before: it says nothing about leases
    assert not ended
    report(one, attempt, "a", "b")
    one.open(client, "a")
    one.ask(client, request("new"))
    assert code(one, client) == "overloaded"
    one.open(client, "rest", output_token_ids=[1])
    assert one.gateway.requests.abort("rest")
    one.hear(client)
    report(one, attempt, "b")
    one.generate("a", 0, 5, finish_reason="stop")
    one.hear(client)
    assert not ended
    report(one, attempt)
    assert not ended  # the client may not have read its answer
    (timer,) = one.timers
    assert timer.seconds == LAST_WORDS
    timer.fire()
    assert ended
    assert one.gateway.status().draining


def test_until_the_scheduler_is_heard_anyone_may_ask_by_an_id(
    stage: Start, ended: list[int]
) -> None:
    one = restarted(stage)
    client = one.connect()
    one.open(client, "a")
    one.generate("a", 0, 5, finish_reason="stop")
    one.hear(client)
    assert not ended


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_scheduler_that_is_not_there_has_nothing_to_wait_for(
    stage: Start, ended: list[int], is_gone: bool
) -> None:
    one = restarted(stage)
    if is_gone:
        type(one.gateway.router).take_running(one.gateway.router, ())
    else:
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            one.gateway.on_heartbeat()
    one.work()
    assert ended


def test_other_clients_do_not_see_the_ids(stage: Start) -> None:
    one = stage()
    report(one, one.gateway.ledger.first_attempt, "secret")
    assert one.gateway.status().schedulers[0].unclaimed == []
