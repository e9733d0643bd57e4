"""Two models of one gateway, whose tokenizers and schedulers the test plays."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from penstock.protocol.config import ModelOptions, PipelineConfig
from penstock.protocol.messages.client import (
    MSGPACK,
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    StatusRequest,
)
from penstock.protocol.messages.pipeline import Heartbeat, TokenizeDone, ToScheduler, ToTokenizer
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.context import Context, Endpoints
from penstock.services.gateway.process import Gateway
from tests.services.gateway.conftest import TIMEOUT, GatewayHarness

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


class TwoModels(GatewayHarness):
    """A gateway of two models, the second one of few places."""

    def __init__(self, context: Context, folder: Path) -> None:
        self.context = context
        options = (
            ModelOptions(served_model_name=NAMES[0]),
            ModelOptions(
                served_model_name=(NAMES[1], "second"), max_num_seqs=1, max_waiting_requests=0
            ),
        )
        config = PipelineConfig(endpoint=f"ipc://{folder}/c", models=options)
        places = []
        for number in range(len(NAMES)):
            names = (f"ipc://{folder}/{name}{number}" for name in Endpoints._fields[2:])
            places.append(Endpoints(config.endpoint, f"ipc://{folder}/inner", *names))
        processes = [
            SimpleNamespace(
                name="gateway.1",
                config=one,
                incarnation=3,
                log=logging.getLogger("gateway"),
                context=context,
                endpoints=at,
                all_endpoints=[at],
            )
            for one, at in zip(config.by_model(), places, strict=True)
        ]
        whole = SimpleNamespace(**vars(processes[0]) | {"config": config})
        whole.by_model = lambda: processes
        self.timers = []
        self.its = dict(zip(NAMES, (Peers(context, at) for at in places), strict=True))
        self.gateway = Gateway(whole, lambda *_: None)  # type: ignore[arg-type]
        self.endpoint = config.endpoint
        self._poller = zmq.Poller()
        for channel, _ in self.gateway.handlers:
            self._poller.register(channel.socket, zmq.POLLIN)
        for peers in self.its.values():
            peers.register()
        models = self.gateway.models
        self.run_until(lambda: all(len(model.tokenizers.peers) for model in models))

    def report(self, name: str, **fields: Any) -> None:
        """Report the status of a model's scheduler."""
        self.its[name].results.send(SchedulerStatus(epoch=1, **fields))


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[TwoModels]:
    context: Context = Context()
    yield TwoModels(context, tmp_path)
    context.destroy(linger=0)


def request(request_id: str, model: str | None = None, **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt="p", model=model, **fields)


def test_the_name_chooses_the_tokenizer(harness: TwoModels) -> None:
    client = harness.connect()
    harness.send(client, request("1"), request("2", NAMES[1]), request("3", NAMES[0]))
    harness.run_until(lambda: len(harness.gateway.ledger) == 3)
    assert [harness.its["a"].task().request_id for _ in range(2)] == ["1", "3"]
    assert harness.its["org/b"].task().request_id == "2"
    harness.send(client, DetokenizeRequest(token_ids=[1], model="b"))
    error = harness.receive_reply(client)
    assert (error.code, error.field) == ("invalid", "model")
    assert error.message == "model: got 'b', expected 'a', 'org/b', 'second'"


def test_a_model_has_several_names(harness: TwoModels) -> None:
    """A request by another name is the same request."""
    client = harness.connect()
    harness.send(client, request("1", "second"), request("1", NAMES[1], seed=2))
    assert "which another open request has" in harness.receive_reply(client).message
    assert harness.its["org/b"].task().request_id == "1"
    harness.send(client, StatusRequest(wait=True, model="second"))
    harness.run_until(lambda: harness.gateway.status.for_ready)
    assert [*harness.gateway.status.for_ready] == ["org/b"]


def test_an_id_is_of_one_model(harness: TwoModels) -> None:
    """A request with the default's name is the request without a name."""
    client = harness.connect()
    harness.send(client, request("1"), request("1", NAMES[0]), request("1", NAMES[1]))
    assert "which another open request has" in harness.receive_reply(client).message
    harness.send(client, request("2", NAMES[1]), AbortRequest(request_id="2"))
    found = {type(one).__name__ for one in (harness.receive_reply(client) for _ in range(2))}
    assert found == {"GenerateReply", "AbortReply"}
    assert harness.gateway.ledger.num_open == 1


def test_a_full_model_is_full_alone(harness: TwoModels) -> None:
    client = harness.connect()
    harness.send(client, *(request(f"a{number}") for number in range(9)))
    harness.send(client, *(request(str(number), NAMES[1]) for number in range(3)))
    assert harness.receive_reply(client).code == "overloaded"
    assert harness.gateway.ledger.get("0")
    harness.send(client, request("a9"))
    harness.run_until(lambda: harness.gateway.ledger.get("a9"))


def test_a_scheduler_that_restarted_gets_its_model_s_requests(harness: TwoModels) -> None:
    client = harness.connect()
    harness.send(client, request("1"), request("2", NAMES[1]))
    harness.run_until(lambda: len(harness.gateway.ledger) == 2)
    first = {name: harness.its[name].task() for name in NAMES}
    harness.report(NAMES[1], ready=True, workers_ready=True)
    harness.run_until(lambda: harness.gateway.models[1].router.statuses)
    again = harness.its[NAMES[1]].task()
    assert (again.request_id, again.attempt > first[NAMES[1]].attempt) == ("2", True)
    assert not harness.its["a"].tokenizer.socket.poll(0)
    names = [ProcessStatus(name="a/scheduler.1", pid=1, uptime=1.0, restarts=0)]
    harness.its["a"].results.send(SupervisorReport(names))
    harness.run_until(lambda: harness.gateway.status.processes)
    absent = [model.router._replicas[0].num_absent for model in harness.gateway.models]
    assert absent == [0, 1]


def test_a_client_that_left_leaves_nothing(harness: TwoModels) -> None:
    client = harness.connect()
    harness.send(client, request("1"), request("2", NAMES[1]))
    harness.run_until(lambda: len(harness.gateway.ledger) == 2)
    client.close()
    while len(harness.gateway.ledger):
        harness.run_heartbeats(1)
    for model in harness.gateway.models:
        totals = model.totals
        assert (totals.num_open, totals.num_waiting, totals.num_bytes) == (0, 0, 0)


def test_a_status_waits_for_one_model_or_all(harness: TwoModels) -> None:
    one, all_ = harness.connect(), harness.connect()
    harness.send(one, StatusRequest(wait=True, model=NAMES[0]))
    harness.send(all_, StatusRequest(wait=True))
    harness.run_until(lambda: len(harness.gateway.status.for_ready) == 2)
    harness.report(NAMES[0], ready=True)
    status = harness.receive_reply(one)
    assert [(its.name, its.ready) for its in status.models] == [("a", True), ("org/b", False)]
    assert (status.ready, status.serves, status.all_serve) == (False, True, False)
    assert not all_.poll(0)
    harness.report(NAMES[1], ready=True)
    assert harness.receive_reply(all_).ready
    one.send(MSGPACK.encode(StatusRequest(wait=True, model="c")))
    assert harness.receive_reply(one).field == "model"
