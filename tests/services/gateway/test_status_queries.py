"""Status requests that wait are few, whatever clients send."""

from collections.abc import Callable

import pytest

from penstock.protocol.messages.client import JSON, StatusRequest
from penstock.protocol.messages.status import SchedulerStatus, StatusReply
from penstock.services.gateway.status import (
    MAX_WAITING,
    MAX_WAITING_PER_CONNECTION,
    PipelineStatus,
)
from tests.services.gateway.conftest import GatewayHarness

Start = Callable[..., GatewayHarness]
LIMIT = MAX_WAITING_PER_CONNECTION
FRESH = StatusRequest(fresh=True)


def test_a_connection_has_a_limit(start_gateway: Start) -> None:
    """Requests beyond it are refused at once; the others are answered by the next report."""
    harness = start_gateway()
    flood, other = harness.connect(), harness.connect()
    harness.send(flood, *[FRESH] * LIMIT, *[StatusRequest(wait=True)] * 500)
    for _ in range(500):
        refused = harness.receive_reply(flood)
        assert (refused.code, refused.retry_after) == ("overloaded", 1.0)
    assert "64 status requests wait on this connection" in refused.message
    harness.send(other, FRESH)
    harness.run_until(lambda: len(harness.gateway.status.for_report) == LIMIT + 1)
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    assert isinstance(harness.receive_reply(other), StatusReply)
    for _ in range(LIMIT):
        assert isinstance(harness.receive_reply(flood), StatusReply)
    harness.send(flood, FRESH)
    harness.run_until(lambda: harness.gateway.status.for_report)


def test_a_fresh_status_of_a_pipeline_that_is_ready(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `wait`, too, it is answered by the next report."""
    harness = start_gateway()
    client = harness.connect()
    monkeypatch.setattr(PipelineStatus, "is_ready", lambda *_: True)
    harness.send(client, StatusRequest(wait=True, fresh=True))
    harness.run_until(lambda: harness.gateway.status.for_report)
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    assert isinstance(harness.receive_reply(client), StatusReply)


def test_all_of_them_have_a_limit(start_gateway: Start) -> None:
    harness = start_gateway()
    clients = [harness.connect() for _ in range(MAX_WAITING // LIMIT)]
    for client in clients:
        harness.send(client, *[FRESH] * LIMIT)
    waiting = harness.gateway.status
    harness.run_until(lambda: len(waiting.for_report) == MAX_WAITING)
    late = harness.connect()
    harness.send(late, FRESH)
    assert (
        harness.receive_reply(late).message
        == "overloaded: 1024 status requests wait, which is the limit"
    )
    inner = harness.connect_inside()
    harness.send(inner, FRESH)
    harness.run_until(lambda: len(waiting.for_report) == MAX_WAITING + 1)
    inner.close()
    clients[0].close()
    harness.run_until(lambda: len(harness.gateway.connections) == len(clients))
    harness.run_heartbeats(1)
    assert len(waiting.for_report) == MAX_WAITING - LIMIT
    harness.send(late, FRESH)
    harness.run_until(lambda: len(waiting.for_report) == MAX_WAITING - LIMIT + 1)


def test_both_encodings_with_and_without_metrics(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    for metrics in (False, True):
        harness.send(client, StatusRequest(fresh=True, metrics=metrics))
        client.send(JSON.encode(StatusRequest(fresh=True, metrics=metrics)))
    harness.run_until(lambda: len(harness.gateway.status.for_report) == 4)
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    replies = []
    for metrics in (False, True):
        packed = harness.receive_reply(client)
        plain = harness.receive_reply(client, JSON)
        replies += [packed, plain]
        assert [bool(reply.metrics) for reply in (packed, plain)] == [metrics] * 2
    assert {reply.schedulers[0].epoch for reply in replies} == {1}


def test_a_client_that_left_waits_for_nothing(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.send(client, StatusRequest(wait=True))
    harness.run_until(lambda: harness.gateway.status.for_ready)
    client.close()
    harness.run_until(lambda: not len(harness.gateway.connections))
    harness.run_heartbeats(1)
    assert not harness.gateway.status.for_ready
