"""Status requests, and two models of one gateway."""

from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.protocol.config import Config
from penstock.protocol.messages.client import (
    JSON,
    MSGPACK,
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    StatusRequest,
)
from penstock.protocol.messages.pipeline import Heartbeat, TokenizeDone, ToScheduler, ToTokenizer
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus, StatusReply
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.context import Context, Endpoints
from penstock.services.gateway.process import (
    MAX_WAITING,
    MAX_WAITING_PER_CONNECTION,
    PipelineStatus,
)
from tests.services.gateway import conftest
from tests.services.gateway.conftest import PROMPT, TIMEOUT, Harness, Socket, process_of

LIMIT = MAX_WAITING_PER_CONNECTION
FRESH = StatusRequest(fresh=True)


def wait_for(harness: Harness, number: int) -> None:
    """Run the gateway until so many requests wait for a report."""
    harness.run_until(lambda: len(harness.status.for_report) == number)


def test_a_connection_has_a_limit(harness: Harness) -> None:
    """Requests beyond it are refused at once; the others are answered by the next report."""
    flood, other = harness.connect(), harness.connect()
    harness.send(flood, *[FRESH] * LIMIT, *[StatusRequest(wait=True)] * 500)
    for _ in range(500):
        refused = harness.receive_reply(flood)
        assert (refused.code, refused.retry_after) == ("overloaded", 1.0)
    assert "64 status requests wait on this connection" in refused.message
    harness.send(other, FRESH)
    wait_for(harness, LIMIT + 1)
    harness.report()
    for client in (other, *[flood] * LIMIT):
        assert isinstance(harness.receive_reply(client), StatusReply)
    harness.send(flood, FRESH)
    wait_for(harness, 1)


def test_all_of_them_have_a_limit(harness: Harness) -> None:
    clients = [harness.connect() for _ in range(MAX_WAITING // LIMIT)]
    for client in clients:
        harness.send(client, *[FRESH] * LIMIT)
    wait_for(harness, MAX_WAITING)
    late, inner = harness.connect(), harness.connect_inside()
    harness.send(late, FRESH)
    message = "overloaded: 1024 status requests wait, which is the limit"
    assert harness.receive_reply(late).message == message
    harness.send(inner, FRESH)
    wait_for(harness, MAX_WAITING + 1)
    harness.leave(inner)
    harness.leave(clients[0])
    harness.run_heartbeats(1)
    assert len(harness.status.for_report) == MAX_WAITING - LIMIT
    harness.send(late, FRESH)
    wait_for(harness, MAX_WAITING - LIMIT + 1)


def test_a_fresh_status_of_a_pipeline_that_is_ready(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `wait`, too, it is answered by the next report."""
    client = harness.connect()
    monkeypatch.setattr(PipelineStatus, "is_ready", lambda *_: True)
    harness.send(client, StatusRequest(wait=True, fresh=True))
    wait_for(harness, 1)
    harness.report()
    assert isinstance(harness.receive_reply(client), StatusReply)


def test_both_encodings_with_and_without_metrics(harness: Harness) -> None:
    client = harness.connect()
    for metrics in (False, True):
        harness.send(client, StatusRequest(fresh=True, metrics=metrics))
        client.send(JSON.encode(StatusRequest(fresh=True, metrics=metrics)))
    wait_for(harness, 4)
    harness.report()
    for metrics in (False, True):
        for codec in (MSGPACK, JSON):
            reply = harness.receive_reply(client, codec)
            assert (bool(reply.metrics), reply.schedulers[0].epoch) == (metrics, 1)


def test_a_client_that_left_waits_for_nothing(harness: Harness) -> None:
    client = harness.connect()
    harness.send(client, StatusRequest(wait=True))
    harness.run_until(lambda: harness.status.for_ready)
    harness.leave(client)
    harness.run_heartbeats(1)
    assert not harness.status.for_ready


def test_the_gateway_counts(harness: Harness) -> None:
    client, other = harness.connect(), harness.connect()
    harness.submit(client, "a", "b", "gone", stream=True)
    harness.send_tokens("a", 0, 2)
    harness.send_tokens("a", 1, 4, cached_tokens=3)  # repeats a token
    harness.send_tokens("a", 4, 4, finish_reason="stop")
    harness.send(client, AbortRequest(request_id="b"), conftest.request("c", max_tokens=9999))
    assert [harness.receive_reply(client) for _ in range(6)][-1].code == "invalid"
    harness.leave(client)
    harness.run_heartbeats(2)
    harness.send(other, StatusRequest(), StatusRequest(metrics=True))
    assert harness.receive_reply(other).metrics is None
    metrics = harness.receive_reply(other).metrics
    assert metrics.request_success == {"stop": 1, "abort": 2}
    assert metrics.request_failed == {"invalid": 1}
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (len(PROMPT), 4)
    assert sum(metrics.time_to_first_token_seconds.counts) == 1
    assert sum(metrics.inter_token_latency_seconds.counts) == 1
    assert sum(metrics.e2e_request_latency_seconds.counts) == 3
    assert metrics.e2e_request_latency_seconds.sum < 100


# ---- two models --------------------------------------------------------------------------------

NAMES = ("a", "org/b")


class Peers:
    """The processes of one model."""

    def __init__(self, context: Context, at: Endpoints) -> None:
        self.scheduler = context.bind(zmq.PULL, at.requests, ToScheduler)
        self._where = context, at

    def register(self) -> None:
        context, at = self._where
        self.tokenizer = context.connect(zmq.DEALER, at.tokenizers, ToTokenizer, b"t")
        self.results = context.connect(zmq.PUSH, at.results)
        self.tokenizer.send(Heartbeat("tokenizer.1"))

    def task(self) -> Any:
        assert self.tokenizer.socket.poll(TIMEOUT)
        _, message = next(self.tokenizer.receive())
        task = message.request
        self.tokenizer.send(TokenizeDone(task.request_id, task.attempt, 7))
        return task


class TwoModels(Harness):
    """A gateway of two models, the second one of few places."""

    def __init__(self, context: Context, folder: Path) -> None:
        second = (NAMES[1], "second")
        options = (
            Config(served_model_name=NAMES[0]),
            Config(served_model_name=second, max_num_seqs=1, max_waiting_requests=0),
        )
        config = Config(endpoint=f"ipc://{folder}/c", models=options)
        places = []
        for number in range(len(NAMES)):
            names = (f"ipc://{folder}/{name}{number}" for name in Endpoints._fields[2:])
            places.append(Endpoints(config.endpoint, f"ipc://{folder}/inner", *names))
        parts = zip(config.by_model(), places, strict=True)
        processes = [process_of(context, part, [at]) for part, at in parts]
        whole = process_of(context, config, places)
        whole.by_model = lambda: processes
        self.its = dict(zip(NAMES, (Peers(context, at) for at in places), strict=True))
        self.start(context, whole)
        for peers in self.its.values():
            peers.register()
        self.run_until(lambda: all(len(model.tokenizers.peers) for model in self.gateway.models))

    def report_of(self, name: str, **fields: Any) -> None:
        """Report the status of a model's scheduler."""
        self.its[name].results.send(SchedulerStatus(epoch=1, **fields))


@pytest.fixture
def models(tmp_path: Path, context: Context) -> TwoModels:
    return TwoModels(context, tmp_path)


@pytest.fixture
def client(models: TwoModels) -> Socket:
    return models.connect()


def request(request_id: str, model: str | None = None, **fields: Any) -> GenerateRequest:
    return conftest.request(request_id, model=model, **fields)


def test_the_name_chooses_the_tokenizer(models: TwoModels, client: Socket) -> None:
    models.send(client, request("1"), request("2", NAMES[1]), request("3", NAMES[0]))
    models.run_until(lambda: len(models.ledger) == 3)
    assert [models.its["a"].task().request_id for _ in range(2)] == ["1", "3"]
    assert models.its["org/b"].task().request_id == "2"
    models.send(client, DetokenizeRequest(token_ids=[1], model="b"))
    error = models.receive_reply(client)
    assert (error.code, error.field) == ("invalid", "model")
    assert error.message == "model: got 'b', expected 'a', 'org/b', 'second'"


def test_a_model_has_several_names(models: TwoModels, client: Socket) -> None:
    """A request by another name is the same request."""
    models.send(client, request("1", "second"), request("1", NAMES[1], seed=2))
    assert "which another open request has" in models.receive_reply(client).message
    assert models.its["org/b"].task().request_id == "1"
    models.send(client, StatusRequest(wait=True, model="second"))
    models.run_until(lambda: models.status.for_ready)
    assert [*models.status.for_ready] == ["org/b"]


def test_an_id_is_of_one_model(models: TwoModels, client: Socket) -> None:
    """A request with the default's name is the request without a name."""
    models.send(client, request("1"), request("1", NAMES[0]), request("1", NAMES[1]))
    assert "which another open request has" in models.receive_reply(client).message
    models.send(client, request("2", NAMES[1]), AbortRequest(request_id="2"))
    found = {type(models.receive_reply(client)).__name__ for _ in range(2)}
    assert found == {"GenerateReply", "AbortReply"}
    assert models.ledger.num_open == 1


def test_a_full_model_is_full_alone(models: TwoModels, client: Socket) -> None:
    models.send(client, *(request(f"a{number}") for number in range(9)))
    models.send(client, *(request(str(number), NAMES[1]) for number in range(3)))
    assert models.receive_reply(client).code == "overloaded"
    assert models.get("0")
    models.submit(client, "a9")


def test_a_scheduler_that_restarted_gets_its_model_s_requests(
    models: TwoModels, client: Socket
) -> None:
    models.send(client, request("1"), request("2", NAMES[1]))
    models.run_until(lambda: len(models.ledger) == 2)
    first = {name: models.its[name].task() for name in NAMES}
    models.report_of(NAMES[1], ready=True, workers_ready=True)
    models.run_until(lambda: models.gateway.models[1].router.statuses)
    again = models.its[NAMES[1]].task()
    assert (again.request_id, again.attempt > first[NAMES[1]].attempt) == ("2", True)
    assert not models.its["a"].tokenizer.socket.poll(0)
    running = [ProcessStatus(name="a/scheduler.1", pid=1, uptime=1.0, restarts=0)]
    models.its["a"].results.send(SupervisorReport(running))
    models.run_until(lambda: models.status.processes)
    absent = [model.router._replicas[0].num_absent for model in models.gateway.models]
    assert absent == [0, 1]


def test_a_client_that_left_leaves_nothing(models: TwoModels, client: Socket) -> None:
    models.send(client, request("1"), request("2", NAMES[1]))
    models.run_until(lambda: len(models.ledger) == 2)
    client.close()
    while len(models.ledger):
        models.run_heartbeats(1)
    for model in models.gateway.models:
        totals = model.totals
        assert (totals.num_open, totals.num_waiting, totals.num_bytes) == (0, 0, 0)


def test_a_status_waits_for_one_model_or_all(models: TwoModels, client: Socket) -> None:
    of_all = models.connect()
    models.send(client, StatusRequest(wait=True, model=NAMES[0]))
    models.send(of_all, StatusRequest(wait=True))
    models.run_until(lambda: len(models.status.for_ready) == 2)
    models.report_of(NAMES[0], ready=True)
    status = models.receive_reply(client)
    assert [(its.name, its.ready) for its in status.models] == [("a", True), ("org/b", False)]
    assert (status.ready, status.all_serve) == (False, False)
    assert not of_all.poll(0)
    models.report_of(NAMES[1], ready=True)
    assert models.receive_reply(of_all).ready
    models.send(client, StatusRequest(wait=True, model="c"))
    assert models.receive_reply(client).field == "model"
