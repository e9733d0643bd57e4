"""Two replicas of one gateway: requests are shared out; a failed replica's requests continue."""

import signal
from collections.abc import Callable

import psutil
import pytest

from penstock.protocol.messages.status import SchedulerStatus
from tests.pipeline.conftest import Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.pipeline
NUM_STREAMS = 4
PROMPT = count_prompt(1, 100)
SHARED = "repeat: " + "abcdefghij" * 60


@pytest.fixture(scope="module")
def served(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("--dp", "2", "--detokenizers", "2", "--max-deaths", "100")


def replicas(served: Pipeline) -> list[SchedulerStatus]:
    with served.client() as client:
        return client.status(fresh=True).schedulers


def test_each_has_workers_of_its_own_and_every_detokenizer(served: Pipeline) -> None:
    first, second = replicas(served)
    assert (first.replica, second.replica) == (0, 1)
    assert (first.workers, second.workers) == (["worker.1"], ["worker.2"])
    assert set(first.detokenizers) == set(second.detokenizers) == {"detokenizer.1", "detokenizer.2"}
    assert "(tp 1, dp 2, 8 processes" in served.wait_for("ready: ")


def test_equal_beginnings_are_computed_once(served: Pipeline) -> None:
    with served.client() as client:
        for number in range(6):
            usage = client.generate(f"{SHARED}{number}", max_tokens=1).usage
            assert (usage.cached_tokens > 500) == (number > 0)


@pytest.mark.parametrize("victim", ["scheduler.2", "worker.1"])
def test_streams_of_a_lost_process_continue(served: Pipeline, victim: str) -> None:
    """Nothing is lost or doubled, and nothing is continued twice.

    A scheduler is awaited: the next one has the KV cache, and computes nothing again.
    """
    before = [one.num_recomputed_tokens for one in replicas(served)]
    processes, start = served.processes(), len(served.output)
    with served.client() as client:
        client.status(wait=True)
        streams = [client.stream(PROMPT) for _ in range(NUM_STREAMS)]
        begins = [next(iter(stream)).text for stream in streams]
        psutil.Process(processes[victim]).send_signal(signal.SIGKILL)
        late = client.submit("17+25=")
        served.wait_for(r"gateway\.1 .*(resubmitting|migrating) [23] requests", start)
        texts = [
            begin + "".join(delta.text for delta in stream)
            for begin, stream in zip(begins, streams, strict=True)
        ]
        assert texts == [answer_to(PROMPT)] * NUM_STREAMS
        assert [stream.result().text for stream in streams] == texts
        assert late.result().text == "42"
        client.status(wait=True)
    if victim.startswith("scheduler"):
        assert [one.num_recomputed_tokens for one in replicas(served)] == before
    while any(one.num_running or one.num_free_blocks < one.num_blocks for one in replicas(served)):
        pass


def test_workers_of_one_replica_are_restarted_while_the_other_serves(served: Pipeline) -> None:
    restarts = served.restarts()
    assert served.run("restart", "worker.2").stdout == "worker.2: back\n"
    after = served.restarts()
    assert {name for name, number in after.items() if number > restarts[name]} == {"worker.2"}
