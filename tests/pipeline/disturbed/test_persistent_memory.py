"""A killed worker or scheduler: weights and KV cache outlive it, and streams continue."""

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.protocol.messages.status import SchedulerStatus
from tests.pipeline.conftest import Pipeline
from tests.pipeline.load import Load
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"),
]
NUM_STREAMS = 6
MAX_PLANS = 4
READY = r"scheduler\.1 +\| .* I workers ready"


@pytest.fixture(scope="module")
def served(disturbed: Pipeline) -> Pipeline:
    return disturbed


def scheduler(served: Pipeline) -> SchedulerStatus:
    with served.client() as client:
        status = client.status(fresh=True).scheduler
    assert status
    return status


def kill(served: Pipeline, name: str = "worker.1", how: signal.Signals = signal.SIGKILL) -> str:
    """Kill the worker or the scheduler; return the line about the workers that follow."""
    start = len(served.output)
    served.kill(name, how)
    return served.wait_for(READY, start)


def test_only_tokens_in_flight_are_computed_again(served: Pipeline) -> None:
    before, start = scheduler(served).num_recomputed_tokens, len(served.output)
    prompts = [count_prompt(number, 200) for number in range(NUM_STREAMS)]
    num_kills = 2
    with served.client() as client:
        streams = [client.stream(prompt) for prompt in prompts]
        deltas = [iter(stream) for stream in streams]
        texts = [next(one).text for one in deltas]
        for _ in range(num_kills):
            assert kill(served).endswith("with the KV of the last ones\n")
            while scheduler(served).num_steps <= MAX_PLANS:  # until tokens are confirmed
                texts[0] += next(deltas[0]).text
        for number, rest in enumerate(deltas):
            texts[number] += "".join(delta.text for delta in rest)
    assert texts == [answer_to(prompt) for prompt in prompts]
    num_recomputed = scheduler(served).num_recomputed_tokens - before
    assert 0 < num_recomputed <= num_kills * NUM_STREAMS * MAX_PLANS
    assert sum("of the last worker" in line for line in served.output[start:]) == num_kills


@pytest.mark.parametrize("name", ["worker.1", "scheduler.1"])
def test_the_prefix_cache_outlives_the_process(served: Pipeline, name: str) -> None:
    with served.client() as client:
        prompt = count_prompt(7, 90)
        text = client.generate(prompt).text
        kill(served, name)
        again = client.generate(prompt)
        assert (again.text, again.usage.cached_tokens > 0) == (text, True)


@pytest.mark.parametrize(
    "names",
    [
        ("scheduler.1",),
        pytest.param(("scheduler.1", "scheduler.1"), marks=pytest.mark.long),
        ("scheduler.1", "worker.1"),
    ],
)
def test_streams_continue_after_a_scheduler_in_their_blocks(
    served: Pipeline, names: tuple[str, ...]
) -> None:
    """Kill the scheduler, and while the next one starts it or the worker, too."""
    prompts = [count_prompt(number, 200) for number in range(10, 10 + NUM_STREAMS)]
    with served.client() as client:
        streams = [client.stream(prompt) for prompt in prompts]
        deltas = [iter(stream) for stream in streams]
        texts = [next(one).text for one in deltas]
        for name in names[:-1]:
            served.kill(name)
        kill(served, names[-1])
        for number, one in enumerate(deltas):
            texts[number] += next(one).text
        status = scheduler(served)
        for number, rest in enumerate(deltas):
            texts[number] += "".join(delta.text for delta in rest)
    assert texts == [answer_to(prompt) for prompt in prompts]
    assert status.num_recomputed_tokens <= names.count("worker.1") * NUM_STREAMS * MAX_PLANS


def test_a_crash_loses_the_memory(served: Pipeline) -> None:
    """A write outside its tensors may have damaged any of the memory."""
    start = len(served.output)
    with Load(served.endpoint, 1):
        line = kill(served, how=signal.SIGSEGV)
    assert "with the KV" not in line
    assert any("is not used again: its process ended" in line for line in served.output[start:])


def shared_memory(pid: int) -> set[int]:
    """Return the inodes of the memory that a process maps or has descriptors of."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    found = {int(number) for number in re.findall(r"(\d+) +/memfd:penstock", maps)}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed after it was listed
            if str(descriptor.readlink()).startswith("/memfd:penstock"):
                found.add(descriptor.stat().st_ino)
    return found


def test_nothing_outlives_a_killed_supervisor(pipeline: Callable[..., Pipeline]) -> None:
    """Neither processes nor memory; the next pipeline may have the name and the endpoint."""
    killed = pipeline()
    held = shared_memory(killed.process.pid)
    assert len(held) == 3
    pids = killed.processes()
    assert shared_memory(pids["worker.1"]) | shared_memory(pids["scheduler.1"]) == held
    children, killed.expected_exit_code = killed.children(), -signal.SIGKILL
    assert len(children) == 7  # with the fork servers of workers and schedulers
    killed.process.kill()
    assert killed.wait() == -signal.SIGKILL
    assert not killed.alive(children)
    for process in psutil.process_iter():
        with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
            assert not held & shared_memory(process.pid)
    again = pipeline(name=killed.name, endpoint=killed.endpoint)
    assert again.run("ask", "17+25=").stdout == "42\n"
    again.process.send_signal(signal.SIGINT)
    assert again.wait() == 0
