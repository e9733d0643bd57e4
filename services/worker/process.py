"""The worker process: takes its place in the group from the scheduler, runs plans, sends tokens.

It is crash-only: what it can't go on with ends it, and it is started afresh.
"""

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol

import zmq

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.plan import BatchPlan, SampledTokens, pack
from penstock.protocol.messages.worker import ToWorker, WorkerAssignment, WorkerExit, WorkerState
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.process import Process
from penstock.services.worker.heartbeat import Watchdog
from penstock.services.worker.network import free_rendezvous, use_interface_of
from penstock.services.worker.step_output import Told


class Launched(Protocol):
    """A step that runs, or has run."""

    def done(self) -> bool:
        """Whether `token_ids` answers without waiting."""

    def token_ids(self) -> list[int]:
        """The sampled tokens in ascending order of slot; waits for them."""

    def told(self) -> Told:
        """What the step tells beside them; waits for it."""


class Runner(Protocol):
    """What computes the steps."""

    num_blocks: int
    """KV blocks there are"""
    block_size: int
    """tokens per block"""

    def idle_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the GPU's wait between two steps; 0 on a CPU."""

    def launch(self, plan: BatchPlan) -> Launched:
        """Start a step; steps run in the order of their launch."""

    def clear(self) -> None:
        """Empty the persistent batch."""


MAX_END = 5.0
"""seconds that a killed worker may take to end"""
Load = Callable[[Config, WorkerAssignment, Callable[[], None]], Runner]
"""Makes the runner of a place in the group; calls the last argument now and then meanwhile."""


class WorkerError(Exception):
    """The worker can't go on, and why."""


class _Step(NamedTuple):
    number: int
    launched: Launched


class Worker:
    """The worker's end of its socket."""

    def __init__(self, process: Process, load: Load) -> None:
        self.channel = process.context.connect(
            zmq.DEALER, process.endpoints.workers, ToWorker, process.identity
        )
        self._process = process
        self._load = load
        self.watchdog = Watchdog()
        self._runner: Runner | None = None
        self._group = ""
        self._rank = -1
        self._epoch = -1
        self._next_step = 0
        self._steps: deque[_Step] = deque()
        """launched, their tokens not yet sent"""
        self._max_running = min(1, process.config.num_plans_in_flight - 1)
        """steps that may run while a plan is waited for: with one, the GPU has something to do"""
        self._said_hello = 0.0

    def say_hello(self) -> None:
        """Tells the scheduler that this worker lives, and what it holds."""
        hello = WorkerState(self._process.name, self._group, self._rank, pid=os.getpid())
        hello.node, hello.incarnation = self._process.context.node_id, self._process.incarnation
        if not self._group:
            hello.rendezvous = free_rendezvous(self._process.context.host)
        if self._runner:
            hello.num_blocks, hello.block_size = self._runner.num_blocks, self._runner.block_size
            hello.idle_us = self._runner.idle_us()
        self.channel.send(hello)
        self._said_hello = time.monotonic()

    def receive(self) -> None:
        """Handle what waits at the socket. Raises WorkerError and what the runner raises."""
        for _, message in self.channel.receive():
            match message:
                case BatchPlan():
                    self._run(message)
                case WorkerAssignment():
                    self._take_place(message)
                case WorkerExit(reason):
                    raise WorkerError(f"leaves: {reason}")
        self._wait()
        self.watchdog.rest()

    def _take_place(self, assignment: WorkerAssignment) -> None:
        if assignment.epoch < self._epoch:
            return  # of a scheduler that is gone
        if self._runner is None:
            self._join(assignment)
        elif (assignment.group, assignment.rank) != (self._group, self._rank):
            raise WorkerError(
                f"rank {self._rank} of group {self._group} can't become "
                f"rank {assignment.rank} of group {assignment.group}"
            )
        if assignment.epoch > self._epoch:
            self._begin(assignment.epoch)

    def _begin(self, epoch: int) -> None:
        """The plans of `epoch` come next, from step 0, for an empty batch."""
        self._epoch = epoch
        self._next_step = 0
        self._steps.clear()
        if self._runner:
            self._runner.clear()

    def _join(self, assignment: WorkerAssignment) -> None:
        self._group, self._rank = assignment.group, assignment.rank
        self.watchdog.group = assignment.group
        self._process.log.info("rank %d of %d: loading", assignment.rank, assignment.tp_size)
        for pid in assignment.pids_before:
            wait_for_end(pid)
        self._runner = self._load(self._process.config, assignment, self._on_progress)
        self.say_hello()

    def _on_progress(self) -> None:
        """Loading takes long: a hello is due now and then."""
        if time.monotonic() - self._said_hello >= HEARTBEAT_INTERVAL:
            self.say_hello()

    def _run(self, plan: BatchPlan) -> None:
        if plan.epoch < self._epoch:
            return
        if self._runner is None or plan.epoch > self._epoch:
            raise WorkerError(f"got a plan of epoch {plan.epoch}; its own is {self._epoch}")
        if plan.step != self._next_step:
            raise WorkerError(f"got plan {plan.step}; plan {self._next_step} comes next")
        self._next_step += 1
        self.watchdog.progress()
        self._steps.append(_Step(plan.step, self._runner.launch(plan)))
        self._send_done()

    def _send_done(self) -> None:
        while self._steps and self._steps[0].launched.done():
            self._send_oldest()

    def _wait(self) -> None:
        """With nothing else to do, waits for tokens that the scheduler needs to go on."""
        while len(self._steps) > self._max_running and not self.channel.socket.poll(0):
            self._send_oldest()
        self._send_done()

    def _send_oldest(self) -> None:
        self.watchdog.progress()
        step = self._steps.popleft()
        token_ids = step.launched.token_ids()
        if self._rank == 0:
            told = step.launched.told()
            self.channel.send(SampledTokens(self._epoch, step.number, pack(token_ids), *told))


def wait_for_end(pid: int) -> None:
    """Return when a process of this machine is gone and its memory is free, or MAX_END is over."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()  # select.select refuses descriptors from 1,024 on
    poller.register(process, select.POLLIN)
    poller.poll(MAX_END * 1000)
    os.close(process)


def main(load: Load) -> NoReturn:
    """Run the process until it is told to stop, or can't go on.

    It ends as if killed. Taken down in order, NCCL waits for ever for CUDA graphs that hold its
    communicators, and for a rank that is gone.
    """
    process = Process("worker")
    code = 1
    try:
        _run(process, load)
        code = 0
    except (WorkerError, ModelError, ConnectionError, SystemExit) as error:
        process.log.error("%s", error)
    except Exception:
        process.log.exception("can't go on")
    logging.shutdown()
    os._exit(code)


def _run(process: Process, load: Load) -> None:
    worker = Worker(process, load)
    worker.watchdog.start(process)
    loop = EventLoop(process.context, worker.say_hello)
    loop.add(worker.channel, worker.receive)
    process.context.on_connected(worker.channel, worker.say_hello)
    if process.context.node_id:
        use_interface_of(process.context.host)
    loop.run()
