"""Status requests that wait are few, whatever clients send."""

from collections.abc import Callable

from penstock.protocol.messages.client import StatusRequest
from penstock.protocol.messages.codec import JSON
from penstock.protocol.messages.status import SchedulerStatus, StatusReply
from penstock.services.gateway import status_queries
from tests.services.gateway.conftest import Stage

Start = Callable[..., Stage]
LIMIT = status_queries.MAX_WAITING_PER_CONNECTION
FRESH = StatusRequest(fresh=True)


def test_a_connection_has_a_limit(stage: Start) -> None:
    """Requests beyond it are refused at once; the others are answered by the next report."""
    one = stage()
    flood, other = one.connect(), one.connect()
    one.ask(flood, *[FRESH] * LIMIT, *[StatusRequest(wait=True)] * 500)
    for _ in range(500):
        refused = one.hear(flood)
        assert (refused.code, refused.retry_after) == ("overloaded", 1.0)
    assert "64 status requests wait on this connection" in refused.message
    one.ask(other, FRESH)
    one.work_until(lambda: len(one.gateway.status_queries.for_report) == LIMIT + 1)
    one.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    assert isinstance(one.hear(other), StatusReply)
    for _ in range(LIMIT):
        assert isinstance(one.hear(flood), StatusReply)
    one.ask(flood, FRESH)
    one.work_until(lambda: one.gateway.status_queries.for_report)


def test_all_of_them_have_a_limit(stage: Start) -> None:
    one = stage()
    clients = [one.connect() for _ in range(status_queries.MAX_WAITING // LIMIT)]
    for client in clients:
        one.ask(client, *[FRESH] * LIMIT)
    waiting = one.gateway.status_queries
    one.work_until(lambda: len(waiting.for_report) == status_queries.MAX_WAITING)
    late = one.connect()
    one.ask(late, FRESH)
    assert one.hear(late).message == "overloaded: 1024 status requests wait, which is the limit"
    clients[0].close()
    one.work_until(lambda: len(one.gateway.connections) == len(clients))
    one.heartbeats(1)
    assert len(waiting.for_report) == status_queries.MAX_WAITING - LIMIT
    one.ask(late, FRESH)
    one.work_until(lambda: len(waiting.for_report) == status_queries.MAX_WAITING - LIMIT + 1)


def test_both_encodings_with_and_without_metrics(stage: Start) -> None:
    one = stage()
    client = one.connect()
    for metrics in (False, True):
        one.ask(client, StatusRequest(fresh=True, metrics=metrics))
        client.send(JSON.encode(StatusRequest(fresh=True, metrics=metrics)))
    one.work_until(lambda: len(one.gateway.status_queries.for_report) == 4)
    one.detokenizer.send(SchedulerStatus(epoch=1, ready=True))
    replies = []
    for metrics in (False, True):
        packed = one.hear(client)
        plain = one.hear(client, JSON)
        replies += [packed, plain]
        assert [bool(reply.metrics) for reply in (packed, plain)] == [metrics] * 2
    assert {reply.schedulers[0].epoch for reply in replies} == {1}
