"""Real worker processes, of one rank and of two, with the test as their scheduler."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from penstock.protocol.config import CONFIG_VARIABLE, Config, write_config
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import BatchPlan, RowExtras, SampledTokens
from penstock.protocol.messages.worker import FromWorker, WorkerAssignment, WorkerState
from penstock.protocol.transport.context import Context, endpoints
from penstock.protocol.transport.process import PROCESS_VARIABLE
from tests.models.forward import load_model, prefill_logits, random_prompts
from tests.models.test_parallel import free_rendezvous
from tests.services.worker.driver import make_runner
from tests.services.worker.plans import plan, row

TIMEOUT = 120
"""seconds that a process may take for anything"""
PROMPTS = random_prompts(264, 37, 20)
SAMPLING = {"temperature": 1.0, "top_k": 40, "seed": 5}


class Workers:
    """The workers of one pipeline, and their scheduler's socket."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.context: Context = Context()
        environment = {**os.environ, CONFIG_VARIABLE: str(write_config(config))}
        self.channel = self.context.bind(zmq.ROUTER, endpoints(config).workers, FromWorker)
        self.processes = {
            f"worker.{number}": subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.services.worker"],
                env={**environment, PROCESS_VARIABLE: f"worker.{number}"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(1, config.tp + 1)
        }
        self.sampled: list[SampledTokens] = []
        """what they have sent"""
        self.members: dict[bytes, str] = {}
        """identity → name, in order of rank"""
        self.rendezvous: dict[bytes, str] = {}
        """identity → where it could listen"""
        self._messages: deque[tuple[bytes, WorkerState | SampledTokens]] = deque()

    def receive(self) -> tuple[bytes, WorkerState | SampledTokens]:
        """Return the next message of a worker, and its identity."""
        while not self._messages:
            assert self.channel.socket.poll(TIMEOUT * 1000)
            self._messages.extend(self.channel.receive())
        return self._messages.popleft()

    def gather(self) -> None:
        """Wait for a hello of every worker."""
        while len(self.members) < self.config.tp:
            identity, hello = self.receive()
            assert isinstance(hello, WorkerState)
            self.members[identity] = hello.name
            self.rendezvous[identity] = hello.rendezvous

    def seat(self, epoch: int, rendezvous: str, spans_nodes: bool = False) -> None:
        """Give every worker its rank and wait until it is ready."""
        for rank, identity in enumerate(self.members):
            place = WorkerAssignment(epoch, "group", rank, self.config.tp, rendezvous)
            place.spans_nodes = spans_nodes
            self.channel.send(place, identity)
        ready: set[bytes] = set()
        while len(ready) < self.config.tp:
            identity, hello = self.receive()
            if isinstance(hello, WorkerState) and hello.num_blocks:
                assert hello.rank == list(self.members).index(identity)
                assert hello.num_blocks == self.config.num_blocks
                ready.add(identity)

    def run(self, step_plan: BatchPlan) -> list[int]:
        """Return the tokens of a step."""
        for identity in self.members:
            self.channel.send(step_plan, identity)
        while True:
            identity, message = self.receive()
            if isinstance(message, SampledTokens):
                assert identity == next(iter(self.members))
                assert (message.epoch, message.step) == (step_plan.epoch, step_plan.step)
                self.sampled.append(message)
                return list(unpack(message.token_ids))

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.context.destroy(linger=0)


Start = Callable[..., Workers]


@pytest.fixture
def start(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the workers of a pipeline; they end with the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    started: list[Workers] = []

    def start_workers(**options: Any) -> Workers:
        given = {"model": str(folder), "num_blocks": 40, "num_threads": 1, **options}
        started.append(Workers(Config(**given)))
        return started[-1]

    yield start_workers
    for workers in started:
        workers.end()


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Start two ranks for several tests: each process imports torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("pair")))
        workers = Workers(Config(model=str(folder), num_blocks=40, num_threads=1, tp=2))
        workers.gather()
        yield workers
        workers.end()


def greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the continuation of a prompt by one rank."""
    model, token_ids = load_model(folder), list(prompt)
    for _ in range(num_tokens):
        logits = prefill_logits(model, [token_ids])
        assert logits is not None
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.slow
def test_every_rank_decodes_the_tokens_of_rows_that_ask(pair: Workers, folder: Path) -> None:
    """With two ranks bias makes the row say 7, which the next step must know on both.

    Penalties count on both what the row says, whether rank 0 samples it (logprobs) or not.
    """
    workers = pair
    rendezvous = next(iter(workers.rendezvous.values()))
    workers.seat(1, rendezvous)
    assert not Path(rendezvous.removeprefix("file://")).exists()  # once the ranks have met
    prompt = PROMPTS[1]
    extras = RowExtras(20, logit_bias={7: 100.0}, num_logprobs=0, num_prompt_logprobs=0)
    added = [row(0, PROMPTS[0], range(10)), row(3, prompt, range(10, 20), extras=extras)]
    bias = {5: 300.0, 255: 200.0, 6: 100.0}  # of both ranks' shards
    for slot, num_logprobs in ((4, -1), (5, 2)):
        asked = RowExtras(5, logit_bias=bias, num_logprobs=num_logprobs)
        added.append(row(slot, range(5), [slot + 20], extras=asked, frequency_penalty=120.0))
    chunks = [(0, 37), (3, 12), (4, 5), (5, 5)]
    tokens = [workers.run(plan(0, added=added, chunks=chunks))]
    tokens.append(workers.run(plan(1, chunks=[(3, 8)])))
    tokens += [workers.run(plan(number)) for number in (2, 3)]
    assert [ids[0] for ids in tokens] == greedy(folder, PROMPTS[0], 4)
    assert [ids[1:-2] for ids in tokens] == [[], [7], [7], [7]]
    assert [ids[-2:] for ids in tokens] == [[5, 5], [255, 255], [5, 5], [6, 6]]
    logits = prefill_logits(load_model(folder), [[*prompt, 7, 7]])
    assert logits is not None
    logprobs = [
        packed for one in workers.sampled for _, some in one.prompt_logprobs for packed in some
    ] + [packed for one in workers.sampled for index, packed in one.logprobs if index == 1]
    told = [pair for packed in logprobs for pair in packed.pairs()]
    said = [*prompt[1:], 7, 7, 7]
    assert [token_id for token_id, _ in told] == said
    expected = logits.log_softmax(-1)[torch.arange(len(said)), said]
    torch.testing.assert_close(torch.tensor([x for _, x in told]), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_two_ranks_run_plans_and_end_together(pair: Workers, folder: Path) -> None:
    """The last test of the pair, which it ends: one is told to stop, and the other follows."""
    workers = pair
    expected = greedy(folder, PROMPTS[0], 6)
    sampled = []
    for epoch in (2, 3):
        workers.seat(epoch, free_rendezvous())
        added = [row(0, PROMPTS[0], range(10)), row(3, PROMPTS[1], range(10, 20), **SAMPLING)]
        first = plan(0, epoch=epoch, added=added, chunks=[(0, 37), (3, 15)])
        tokens = [workers.run(first), workers.run(plan(1, epoch=epoch, chunks=[(3, 5)]))]
        tokens += [workers.run(plan(number, epoch=epoch)) for number in range(2, 6)]
        assert [ids[0] for ids in tokens] == expected
        sampled.append([ids[1] for ids in tokens[1:]])
        assert workers.run(plan(6, epoch=epoch, removed=[0, 3])) == []
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0])) > 1

    rank_0, rank_1 = (workers.processes[name] for name in workers.members.values())
    rank_1.terminate()
    assert rank_1.wait(TIMEOUT) == 0
    added = [row(0, PROMPTS[0], range(10))]
    workers.channel.send(
        plan(7, epoch=3, added=added, chunks=[(0, 37)]), next(iter(workers.members))
    )
    _, log = rank_0.communicate(timeout=TIMEOUT)
    assert rank_0.returncode == 1
    sentence = "rank 0 of 2 lost its group: another rank has exited"
    assert log.splitlines()[-1].partition(" E ")[2] == sentence
    assert "Traceback" not in log


@pytest.mark.long
def test_ranks_on_several_nodes_draw_the_tokens_of_one(start: Start, folder: Path) -> None:
    """From candidates, or, for the last three rows, in the second pass."""
    workers = start(tp=2)
    workers.gather()
    rendezvous = next(iter(workers.rendezvous.values()))
    workers.seat(1, rendezvous, spans_nodes=True)
    kinds = [
        {},
        {"temperature": 1.5},
        SAMPLING,
        {"temperature": 2.0, "top_k": 64, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 200},
    ]
    added = [
        row(slot, PROMPTS[1], range(3 * slot, 3 * slot + 3), **{"seed": slot, **kind})
        for slot, kind in enumerate(kinds)
    ]
    plans = [plan(added=added, chunks=[(slot, 20) for slot in range(len(kinds))])]
    plans += [plan(number) for number in range(1, 20)]
    alone = make_runner(folder)
    expected = [alone.launch(one).token_ids() for one in plans]
    assert [workers.run(one) for one in plans] == expected
    assert all(len(set(tokens)) > 5 for tokens in zip(*expected, strict=True))


@pytest.mark.slow
def test_a_model_that_can_not_be_served_ends_it_with_a_sentence(start: Start) -> None:
    workers = start(model="/nowhere")
    workers.gather()
    identity = next(iter(workers.members))
    workers.channel.send(WorkerAssignment(1, "group", 0, 1, ""), identity)
    _, log = workers.processes["worker.1"].communicate(timeout=TIMEOUT)
    assert workers.processes["worker.1"].returncode == os.EX_CONFIG
    assert log.splitlines()[-1].partition(" E ")[2] == "model folder /nowhere does not exist"
    assert "Traceback" not in log
