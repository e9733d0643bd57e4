"""Restarts that are asked for, and what a signal lets be finished."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

from penstock.protocol.client.session import RequestError
from penstock.protocol.messages.status import StatusReply
from tests.pipeline.conftest import LAUNCH, PATIENT, Pipeline
from tests.pipeline.load import Load
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.pipeline
Start = Callable[..., Pipeline]
PROMPT = count_prompt(1, 30)
NUM_STREAMS = 6
IN_TURN = ["gateway.1", "tokenizer.1", "tokenizer.2", "scheduler.1", "worker.1"]
IN_TURN += ["detokenizer.1", "detokenizer.2", "http.1"]


@pytest.fixture(scope="module")
def shared(disturbed: Pipeline) -> Iterator[Pipeline]:
    """Scale the pipeline of the tests that leave it as it was."""
    for number in ("2", "1"):
        for kind in ("tokenizer", "detokenizer"):
            assert disturbed.run("scale", kind, number).returncode == 0
        if number == "2":
            yield disturbed


@pytest.mark.timeout(600)
def test_all_are_restarted_under_load(shared: Pipeline) -> None:
    """One process after the other, each back before the next; no client sees any of it.

    The workers of a group are one: `tests/pipeline/test_models.py`.
    """
    start, before, restarts = len(shared.output), shared.processes(), shared.restarts()
    command = [*LAUNCH, "restart", "--name", shared.name, "all"]
    with Load(shared.endpoint, NUM_STREAMS):
        restart = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert restart.stdout == "".join(f"{names}: back\n" for names in IN_TURN)
    assert restart.returncode == 0
    after = shared.processes()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert shared.restarts() == {name: number + 1 for name, number in restarts.items()}
    assert not [line for line in shared.output[start:] if "died" in line]


@pytest.mark.timeout(600)
def test_a_restart_is_no_death(pipeline: Start) -> None:
    """Two deaths end this pipeline; restarts do not. Then it says what died, and of what."""
    running = pipeline("--max-deaths", "2")
    for target in ("tokenizer", "detokenizer.1", "scheduler", "gateway"):
        name = target.removesuffix(".1") + ".1"
        pid = running.processes()[name]
        restarted = running.run("restart", target)
        assert (restarted.stdout, restarted.stderr) == (f"{name}: back\n", "")
        assert running.processes()[name] != pid
        assert running.status()["gateway"]["ready"]
    running.kill("tokenizer.1")
    running.expected_exit_code = 1
    psutil.Process(running.pid("tokenizer.1")).kill()
    line = running.wait_for("launch: ")
    assert re.match(
        r"launch: tokenizer\.1 died 2 times within 60 s, the last time with signal 9; "
        r"the pipeline stops\. Its last lines:",
        line,
    )
    assert running.wait() == 1


def test_idle_workers_are_back_when_they_have_been_away(shared: Pipeline) -> None:
    """Nobody misses them before their successors come: until then all seems ready."""
    with shared.client() as client:
        client.generate(PROMPT)
        scheduler = client.status(fresh=True).scheduler
        assert scheduler is not None
        assert scheduler.num_steps > 0
        assert shared.run("restart", "worker").stdout == "worker.1: back\n"
        scheduler = client.status().scheduler
        assert scheduler is not None
        assert (scheduler.ready, scheduler.num_steps) == (True, 0)  # of the new group


def test_what_is_not_there_is_not_restarted(shared: Pipeline) -> None:
    refused = shared.run("restart", "worker.3")
    assert refused.returncode == 2
    assert refused.stderr == (
        "launch: process: got 'worker.3', expected one of gateway.1, tokenizer.1, tokenizer.2, "
        "scheduler.1, worker.1, detokenizer.1, detokenizer.2, http.1\n"
    )


@pytest.mark.long
def test_a_restart_ends_with_the_pipeline(pipeline: Start) -> None:
    running = pipeline(*PATIENT)
    command = [*LAUNCH, "restart", "--name", running.name, "gateway"]
    with (
        running.suspended("scheduler.1"),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as restart,
    ):
        running.wait_for(r"launch +\| .* gateway\.1 restarted on request")
        running.process.terminate()
        said = restart.communicate()[1]
    assert (restart.returncode, said) == (
        2,
        "launch: the pipeline ended before the command was done\n",
    )
    assert running.wait() == 0


@pytest.mark.long
def test_what_runs_is_finished_and_nothing_begun(pipeline: Start) -> None:
    running = pipeline(*PATIENT)
    with running.client() as client:
        with running.suspended("worker.1"):
            stream = client.stream(PROMPT)
            assert client.status().num_requests == 1
            running.process.terminate()
            running.wait_for(r"launch +\| .* no new requests")
            while not client.status().draining:
                pass  # the gateway has yet to hear the signal
            with pytest.raises(RequestError, match="the pipeline is stopping") as refused:
                client.generate(PROMPT)
            assert refused.value.code == "overloaded"
        assert "".join(delta.text for delta in stream) == answer_to(PROMPT)
    assert running.wait() == 0


@pytest.mark.parametrize("is_before", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_drain_outlives_the_gateway(pipeline: Start, is_before: bool) -> None:
    """A gateway is killed just before or in its drain.

    Its clients resubmit to the next gateway, which admits nobody else.
    """
    prompt = count_prompt(1, 20)
    running = pipeline("--drain-timeout", "3600", *PATIENT)
    with running.client() as client:
        with running.suspended("worker.1"):
            streams = [client.stream(prompt) for _ in range(6)]
            while (status := client.status(fresh=True)).num_requests < 6:
                pass  # reports come from the scheduler, every heartbeat
            gateway = psutil.Process(running.processes()["gateway.1"])
            if is_before:
                gateway.kill()
            running.process.terminate()
            running.wait_for(r"launch +\| .* no new requests")
            if not is_before:
                gateway.kill()
            running.wait_for(r"launch +\| .* gateway\.1 died with signal 9; restarted")
            while not (after := client.status()).draining or not is_heard(after, status):
                pass
            with pytest.raises(RequestError, match="the pipeline is stopping") as refused:
                client.generate(PROMPT)
            assert refused.value.code == "overloaded"
        texts = ["".join(delta.text for delta in stream) for stream in streams]
        assert texts == [answer_to(prompt)] * 6
    assert running.wait() == 0


def is_heard(status: StatusReply, before: StatusReply) -> bool:
    """Return whether the scheduler has reported to the gateway that started after `before`."""
    (old,) = before.schedulers
    return any(one.first_attempt > old.first_attempt for one in status.schedulers)


@pytest.mark.long
def test_the_second_signal_waits_for_nothing(pipeline: Start) -> None:
    running = pipeline("--drain-timeout", "3600", *PATIENT)
    with running.client() as client, running.suspended("worker.1"):
        client.stream(PROMPT)
        assert client.status().num_requests == 1
        running.process.send_signal(signal.SIGINT)
        running.wait_for(r"launch +\| .* no new requests")
        running.process.terminate()
    assert running.wait() == 0
