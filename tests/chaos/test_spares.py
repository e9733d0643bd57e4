"""Other workers take the places of killed ones, with the memory of these."""

import signal

import pytest

from penstock.launch.pipeline.control_client import list_processes
from penstock.protocol.client.client import Client
from penstock.protocol.messages.status import SchedulerStatus
from tests.chaos.conftest import Start
from tests.pipeline.conftest import Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.chaos
PROMPT = count_prompt(1, 100)
READY = r".*standby for rank 0 of 1: ready"


@pytest.fixture(scope="module")
def served(pipeline: Start) -> Pipeline:
    """Return a pipeline with one standby worker, which tests leave whole."""
    one = pipeline("--spare-workers", "1", "--hang-timeout", "4", "--max-deaths", "1000")
    one.wait_for(READY)
    return one


@pytest.fixture(scope="module")
def served_by_two(pipeline: Start) -> Pipeline:
    return pipeline("--tp", "2", "--spare-workers", "2", "--hang-timeout", "4")


def scheduler_of(client: Client) -> SchedulerStatus:
    status = client.status(fresh=True).scheduler
    assert status
    return status


def ready_standby(served: Pipeline) -> set[str]:
    """Return the names of the workers that report that they can take over at once."""
    found = list_processes(served.name)
    return {one.name for one in found if one.counters.get("standby_ready")}


@pytest.mark.parametrize(
    ("fixture", "tp"), [("served", 1), pytest.param("served_by_two", 2, marks=pytest.mark.long)]
)
def test_a_standby_group_continues_and_the_killed_one_comes_back_as_standby(
    request: pytest.FixtureRequest, fixture: str, tp: int
) -> None:
    served: Pipeline = request.getfixturevalue(fixture)
    start = len(served.output)
    every = {f"worker.{number}" for number in range(1, 2 * tp + 1)}
    begin = 0
    with served.client() as client:
        for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            for rank in range(tp):
                served.wait_for(rf".*standby for rank {rank} of {tp}: ready", begin)
            begin = len(served.output)
            status = scheduler_of(client)
            stream = client.stream(PROMPT)
            text = next(iter(stream)).text
            served.kill(status.workers[-1], how)
            client.status()  # is answered; on a slow machine the stream may have ended meanwhile
            assert text + "".join(delta.text for delta in stream) == answer_to(PROMPT)
            assert {*scheduler_of(client).workers} == every - {*status.workers}
        for rank in range(tp):
            served.wait_for(rf".*standby for rank {rank} of {tp}: ready", begin)
    assert sum("with the KV of the last ones" in line for line in served.output[start:]) == 3


def test_a_standby_worker_that_dies_disturbs_nobody(served: Pipeline) -> None:
    with served.client() as client:
        status = scheduler_of(client)
        [spare] = {"worker.1", "worker.2"} - {*status.workers}
        while ready_standby(served) != {spare}:
            assert client.status(fresh=True).ready
        begin = len(served.output)
        stream = client.stream(PROMPT)
        text = next(iter(stream)).text
        served.kill(spare)
        assert text + "".join(delta.text for delta in stream) == answer_to(PROMPT)
        served.wait_for(READY, begin)
        after = scheduler_of(client)
        assert after.workers == status.workers
        assert after.num_recomputed_tokens == status.num_recomputed_tokens


def test_after_a_crash_the_standby_worker_does_not_use_the_memory(served: Pipeline) -> None:
    """A wild write may have damaged any of it: all is computed again."""
    begin = len(served.output)
    with served.client() as client:
        status = scheduler_of(client)
        stream = client.stream(PROMPT)
        text = next(iter(stream)).text
        served.kill(status.workers[0], signal.SIGSEGV)
        assert text + "".join(delta.text for delta in stream) == answer_to(PROMPT)
        served.wait_for(READY, begin)
    assert not any("with the KV of the last ones" in line for line in served.output[begin:])


@pytest.mark.long
def test_all_ranks_of_a_group_have_the_memory_of_the_last_ones(
    pipeline: Start,
) -> None:
    """One rank is killed, and the other one with it; each maps its own part."""
    served = pipeline("--tp", "2")
    with served.client() as client:
        stream = client.stream(PROMPT)
        begin = next(iter(stream)).text
        served.kill("worker.2")
        assert begin + "".join(delta.text for delta in stream) == answer_to(PROMPT)
        status = scheduler_of(client)
    assert status.num_recomputed_tokens <= status.num_preemptions + 4  # plans in flight
    assert sum("of the last worker" in line for line in served.output) == 2
    assert sum("with the KV of the last ones" in line for line in served.output) == 1
