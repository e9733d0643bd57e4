"""A worker whose runner computes nothing, and the scheduler's end of its socket."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

from penstock.protocol.config import Config
from penstock.protocol.messages.packed import PackedLogprobs, pack
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.worker import FromWorker, WorkerAssignment, WorkerState
from penstock.protocol.transport.context import Context
from penstock.services.worker.launched_step import StepOutput
from penstock.services.worker.process import Worker

TIMEOUT = 60_000
"""milliseconds that a message may take"""

LOGPROBS = PackedLogprobs(pack([5]), b"1234")
OUTPUT = StepOutput([(1, LOGPROBS)], [(3, [LOGPROBS, LOGPROBS])], [(0, "too long")], [(1, b"1234")])


class FakeStep:
    """A step whose tokens are its epoch and number; done when the test says so."""

    def __init__(self, step_plan: BatchPlan, done: bool, on_wait: Callable[[int], None]) -> None:
        self._token_ids = [step_plan.epoch, step_plan.step]
        self._done = done
        self._on_wait = on_wait

    def complete(self) -> None:
        """Nothing is left to launch."""

    def done(self) -> bool:
        return self._done

    def token_ids(self) -> list[int]:
        self._done = True
        self._on_wait(self._token_ids[1])
        return self._token_ids

    def output(self) -> StepOutput:
        return OUTPUT


class FakeRunner:
    """A runner that records its plans."""

    num_blocks = 5
    block_size = 16
    memory_id = 7
    progress = 0
    step_sizes = 64, 128
    tile_sizes = 16, 32
    offload = states = None

    def __init__(self) -> None:
        self.launched: list[BatchPlan] = []
        self.steps_are_done = True
        self.on_launch: Callable[[int], None] = lambda _: None
        self.on_wait: Callable[[int], None] = lambda _: None
        self.num_clears = 0

    def launch(self, step_plan: BatchPlan) -> FakeStep:
        self.launched.append(step_plan)
        self.on_launch(step_plan.step)
        return FakeStep(step_plan, self.steps_are_done, self.on_wait)

    def clear(self) -> None:
        self.num_clears += 1

    def idle_us(self) -> tuple[float, float]:
        return 3.0, 4.0


class Talk:
    """A worker, and the scheduler's end of its socket."""

    def __init__(self, context: Context, folder: Path, num_plans_in_flight: int = 2) -> None:
        self.context = context
        context.node_id = "node-a"
        endpoint = f"ipc://{folder}/workers"
        self.scheduler = self.context.bind(zmq.ROUTER, endpoint, FromWorker)
        process = SimpleNamespace(
            config=Config(num_plans_in_flight=num_plans_in_flight),
            name="worker.1",
            incarnation=17,
            identity=b"worker.1/7",
            context=self.context,
            endpoints=SimpleNamespace(workers=endpoint),
            log=logging.getLogger("worker"),
        )
        self.runner = FakeRunner()
        self.num_loads = 0
        self.num_progress_calls = 0
        self.worker = Worker(process, self._load)  # type: ignore[arg-type]
        self.worker.send_state()
        self.answer()

    def _load(
        self, _config: Config, _assignment: WorkerAssignment, on_progress: Callable[[], None]
    ) -> FakeRunner:
        for _ in range(self.num_progress_calls):
            on_progress()
        self.num_loads += 1
        return self.runner

    def tell(self, *messages: object) -> None:
        """Send to the worker, which handles it all."""
        for message in messages:
            self.tell_bytes(self.scheduler.encode(message))

    def tell_bytes(self, frame: bytes) -> None:
        """Send what need not be a message."""
        self.bring_bytes(frame)
        self.worker.receive()

    def bring(self, message: object) -> None:
        """Send a message that then waits at the worker's socket."""
        self.bring_bytes(self.scheduler.encode(message))

    def bring_bytes(self, frame: bytes) -> None:
        """As `bring`."""
        assert self.scheduler.send_bytes(frame, b"worker.1/7")
        assert self.worker.channel.socket.poll(TIMEOUT)

    def answer(self) -> WorkerState | SampledTokens:
        """Return the worker's next message."""
        assert self.scheduler.socket.poll(TIMEOUT)
        message: WorkerState | SampledTokens
        _, message = next(self.scheduler.receive())
        return message

    def says_nothing_more(self) -> bool:
        """Return whether a hello sent now is the next message."""
        self.worker.send_state()
        return isinstance(self.answer(), WorkerState)


def hello(*fields: Any, epoch: int = -1, num_plans_before: int = 0) -> WorkerState:
    state = WorkerState(*fields, pid=os.getpid(), node="node-a", incarnation=17)
    state.epoch, state.num_plans_before = epoch, num_plans_before
    state.memory_id = FakeRunner.memory_id if state.num_blocks else 0
    state.step_sizes = [*FakeRunner.step_sizes] if state.num_blocks else []
    state.tile_sizes = [*FakeRunner.tile_sizes] if state.num_blocks else []
    return state


def assignment(epoch: int = 1, group: str = "g", rank: int = 0) -> WorkerAssignment:
    return WorkerAssignment(epoch, group, rank, 2, "tcp://127.0.0.1:1")


def tokens_of(epoch: int, step: int) -> SampledTokens:
    """Return the worker's message after a step of its runner."""
    return SampledTokens(epoch, step, pack([epoch, step]), *OUTPUT)
