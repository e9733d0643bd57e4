"""Other workers take the places of killed ones, with the memory of these."""

from collections.abc import Callable

import pytest

from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.chaos
PROMPT = count_prompt(1, 100)


def test_a_spare_worker_goes_on_and_the_killed_one_comes_back_as_spare(
    pipeline: Callable[..., Pipeline],  # noqa: F811
) -> None:
    served = pipeline("--spare-workers", "1")
    with served.client() as client:
        seats = client.status(fresh=True).scheduler
        assert seats
        [first] = seats.workers
        [spare] = {"worker.1", "worker.2"} - {first}
        for victim, successor in ((first, spare), (spare, first)):
            stream = client.stream(PROMPT)
            begin = next(iter(stream)).text
            served.kill(victim)
            assert client.status().num_requests == 1
            assert begin + "".join(delta.text for delta in stream) == answer_to(PROMPT)
            status = client.status(fresh=True).scheduler
            assert status
            assert status.workers == [successor]
        assert sum("with the KV of the last ones" in line for line in served.output) == 2


@pytest.mark.long
def test_all_ranks_of_a_group_have_the_memory_of_the_last_ones(
    pipeline: Callable[..., Pipeline],  # noqa: F811
) -> None:
    """One rank is killed, and the other one with it; each maps its own part."""
    served = pipeline("--tp", "2")
    with served.client() as client:
        stream = client.stream(PROMPT)
        begin = next(iter(stream)).text
        served.kill("worker.2")
        assert begin + "".join(delta.text for delta in stream) == answer_to(PROMPT)
        status = client.status(fresh=True).scheduler
    assert status
    assert status.num_recomputed_tokens <= status.num_preemptions + 4  # plans in flight
    assert sum("of the last worker" in line for line in served.output) == 2
    assert sum("with the KV of the last ones" in line for line in served.output) == 1
