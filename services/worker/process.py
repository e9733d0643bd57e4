"""The worker process, which takes a rank, runs plans and sends their tokens."""

import contextlib
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import psutil
import torch
import zmq

from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.worker import (
    CompileGrammars,
    CopyBlocks,
    FolderRequest,
    GrammarCompiled,
    ToWorker,
    WorkerAssignment,
    WorkerExit,
    WorkerState,
)
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import host_and_port
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process, ProcessExit
from penstock.services.worker.launched_step import LaunchedStep
from penstock.services.worker.memory.persistent_memory import SharedMemoryError
from penstock.services.worker.memory.state_memory import kept_states
from penstock.services.worker.model_runner import ModelRunner

MAX_END = 5.0  # maximum wait in seconds for the end of a killed worker
# Makes the runner of a rank. Calls the last argument repeatedly during loading.
Load = Callable[[Config, WorkerAssignment, Callable[[], None]], ModelRunner]


class WorkerError(Exception):
    """An error after which the worker exits."""


class _Step(NamedTuple):
    number: int
    launched: LaunchedStep
    is_awaited: bool  # True if the scheduler waits for the tokens before the next plan


class Worker:
    """A rank of a worker group or standby group, which the scheduler assigns.

    Steps are launched, and their tokens sent, in the order of the plans.
    """

    def __init__(self, process: Process, load: Load) -> None:
        self.channel = process.context.connect(
            zmq.DEALER, process.endpoints.workers, ToWorker, process.identity
        )
        self._process = process
        self._load = load
        self._runner: ModelRunner | None = None
        self.heartbeats = HeartbeatThread(process, self._counters, work=self._progress)
        self.loop = EventLoop(process.context, self.send_state)
        self.loop.add(self.channel, self.receive)
        self._group = ""
        self._rank = -1
        self._epoch = -1
        self._num_plans_before = 0
        self._sent_state_at = 0.0
        self._is_standby = self._is_prepared = False
        # messages that arrived while graphs were captured
        self._deferred_messages: deque[ToWorker] = deque()
        self._next_step = 0
        self._steps: deque[_Step] = deque()  # launched steps whose tokens are not sent yet
        # reports of the compiler thread
        self._compiled: deque[GrammarCompiled] = deque()
        self._notify_compiled = self.make_notifier(self._send_compiled)
        # steps that may run while the worker waits for a plan: a single step keeps the GPU busy
        self._max_running = min(1, process.config.num_plans_in_flight - 1)

    # ---- the turn of the loop ----------------------------------------------------------------

    def receive(self) -> None:
        """Handle waiting messages. Raises WorkerError and errors of the runner."""
        for _, message in self.channel.receive():
            self._handle(message)
            while self._deferred_messages:
                self._handle(self._deferred_messages.popleft())
        self._wait()
        self.heartbeats.rest()

    def _handle(self, message: ToWorker) -> None:
        match message:
            case BatchPlan():
                self._launch_step(message)
            case CopyBlocks() | FolderRequest():
                self._copy(message)
            case CompileGrammars():
                self._compile(message)
            case WorkerAssignment():
                self._take_place(message)
                if message.epoch > self._epoch:
                    self._begin_epoch(message.epoch)
            case WorkerExit(reason):
                raise WorkerError(f"the scheduler ended this worker: {reason}")

    # ---- steps ------------------------------------------------------------------------------

    def _begin_epoch(self, epoch: int) -> None:
        """Begin an epoch with an empty batch at step 0, and report the epoch to the scheduler."""
        self._epoch, self._num_plans_before = epoch, self._next_step
        self._next_step = 0
        self._steps.clear()
        if self._runner:
            self._runner.clear()
        self.send_state()

    def _launch_step(self, plan: BatchPlan) -> None:
        if plan.epoch < self._epoch:
            return
        if self._runner is None or plan.epoch > self._epoch:
            raise WorkerError(f"plan: got epoch {plan.epoch}, expected {self._epoch}")
        if plan.step != self._next_step:
            raise WorkerError(f"plan: got step {plan.step}, expected {self._next_step}")
        self._next_step += 1
        self.heartbeats.progress()
        self._steps.append(_Step(plan.step, self._runner.launch(plan), plan.is_awaited))
        self._send_done()

    def _send_done(self) -> None:
        while self._steps and self._steps[0].launched.done():
            self._send_oldest()

    def _wait(self) -> None:
        """Wait for the oldest step's tokens while no message waits."""
        is_awaited = bool(self._steps) and self._steps[-1].is_awaited
        max_running = 0 if is_awaited else self._max_running
        while len(self._steps) > max_running and not self.channel.socket.poll(0):
            self._send_oldest()
        self._send_done()
        if self._steps:  # after tokens were sent, for which the scheduler waits
            self._steps[-1].launched.complete()
            self._send_done()

    def _send_oldest(self) -> None:
        self.heartbeats.progress()
        step = self._steps.popleft()
        token_ids = step.launched.token_ids()
        if self._rank == 0:
            output = step.launched.output()
            self.channel.send(SampledTokens(self._epoch, step.number, pack(token_ids), *output))

    def _copy(self, message: CopyBlocks | FolderRequest) -> None:
        if message.epoch < self._epoch:
            return
        if self._runner is None or self._runner.offload is None:
            raise WorkerError("CopyBlocks: got copies, expected none without --kv-offload-gib")
        if isinstance(message, FolderRequest):
            self._runner.offload.work(message)
        else:
            self._runner.offload.copy(message)

    def _compile(self, message: CompileGrammars) -> None:
        """Start to compile grammars in a thread, during the steps."""
        if message.epoch < self._epoch:
            return
        grammars = self._runner and self._runner.logits_processor.grammars
        if not grammars:
            raise WorkerError("CompileGrammars: got grammars, expected them at rank 0 only")
        grammars.forget(message.removed)
        for number, spec in message.added:
            grammars.compile(number, spec, partial(self._on_compiled, message.epoch, number))

    def _on_compiled(self, epoch: int, number: int, num_bytes: int, error: str) -> None:
        """Pass a report to the event loop. Called by the compiler thread."""
        self._compiled.append(GrammarCompiled(epoch, number, num_bytes, error))
        self._notify_compiled()

    def _send_compiled(self) -> None:
        while self._compiled:
            self.channel.send(self._compiled.popleft())

    # ---- its place in a group ----------------------------------------------------------------

    def send_state(self) -> None:
        state = WorkerState(self._process.name, self._group, self._rank, pid=os.getpid())
        state.node, state.incarnation = self._process.context.node_id, self._process.incarnation
        state.standby = self._is_standby
        state.epoch, state.num_plans_before = self._epoch, self._num_plans_before
        if not self._group:
            state.rendezvous = self._new_rendezvous()
        if self._runner:
            state.num_blocks, state.block_size = self._runner.num_blocks, self._runner.block_size
            state.idle_us, state.memory_id = self._runner.idle_us(), self._runner.memory_id
            state.step_sizes = self._runner.step_sizes
            state.tile_sizes = self._runner.tile_sizes
            if states := self._runner.states:
                state.num_state_blocks = self._runner.num_state_blocks
                state.blocks_per_state = self._runner.blocks_per_state
                state.kept_states = b"" if self._next_step else kept_states(states)
            if offload := self._runner.offload:
                state.host_slots, state.host_memory_id = offload.num_slots, offload.memory_id
                state.num_pieces = offload.num_pieces
                if offload.folder:
                    offload.folder.check_time()
        self.channel.send(state)
        self.heartbeats.sender.count()
        self._sent_state_at = time.monotonic()

    def _new_rendezvous(self) -> str:
        """Return the address at which the ranks of a group find each other.

        Ranks on CPUs of one machine meet in a file. For an address, torch would look up its host
        name, which waits and warns if no name server answers.
        """
        context, config = self._process.context, self._process.config
        if context.node_id or (config.device != "cpu" and torch.cuda.is_available()):
            return free_rendezvous(context.host)
        return f"file://{config.run_folder}/rendezvous-{uuid.uuid4().hex}"

    def _progress(self) -> int:
        return self._runner.progress if self._runner else 0

    def _counters(self) -> dict[str, float]:
        return {"standby_ready": float(self._is_standby and self._is_prepared)}

    def _take_place(self, assignment: WorkerAssignment) -> None:
        """Load the assigned rank, or take over from the last worker. Raises WorkerError."""
        if assignment.epoch < self._epoch:
            return  # from an earlier scheduler
        place = assignment.group, assignment.rank
        is_first = not self._group
        if not is_first and place != (self._group, self._rank):
            raise WorkerError(
                f"assignment: got rank {assignment.rank} of group {assignment.group}, "
                f"expected rank {self._rank} of group {self._group}"
            )
        self._group, self._rank = place
        self.heartbeats.sender.group = assignment.group
        self.heartbeats.sender.group_size = assignment.tp_size
        if is_first:
            self.heartbeats.report()  # before `load` waits for the other ranks
        if assignment.standby:
            if is_first:
                self._prepare(assignment)
        elif self._runner is None:
            self._join(assignment)
        elif self._is_standby:
            wait_for_ends(assignment.pids_before)
            self._runner.take_over()
            self._is_standby = False
            self._watch_folder(self._runner)

    def _join(self, assignment: WorkerAssignment) -> None:
        if self._is_standby and assignment.tp_size > 1:
            raise WorkerError("the standby group was not prepared")  # other ranks may be prepared
        self._is_standby = False
        self._process.log.info("rank %d of %d: loading", assignment.rank, assignment.tp_size)
        wait_for_ends(assignment.pids_before)
        self._runner = self._load(self._process.config, assignment, self._on_progress)
        self._watch_folder(self._runner)

    def _prepare(self, assignment: WorkerAssignment) -> None:
        """Load a rank with the running worker's memory. Capture graphs until that worker dies."""
        self._is_standby = True
        log, rank = self._process.log, assignment.rank
        log.info("standby for rank %d of %d: loading", rank, assignment.tp_size)
        try:
            self._runner = self._load(self._process.config, assignment, self._on_progress)
            for _ in self._runner.capture_graphs():
                self._on_progress()
                if self._has_pending_message(assignment.tp_size):
                    break
            self._is_prepared = True
            self.heartbeats.sender.count()
            self.heartbeats.report()
            log.info("standby for rank %d of %d: ready", rank, assignment.tp_size)
        except (SharedMemoryError, torch.OutOfMemoryError) as error:
            self._runner = None
            log.warning("standby for rank %d is not prepared: %s", rank, error)

    def _has_pending_message(self, tp_size: int) -> bool:
        """Return whether a message other than a standby assignment waits, and keep the messages.

        Return False for groups of several ranks, which must all capture the same graphs.
        """
        messages = self._deferred_messages
        messages.extend(message for _, message in self.channel.receive())
        return tp_size == 1 and any(
            not (isinstance(message, WorkerAssignment) and message.standby) for message in messages
        )

    def _on_progress(self) -> None:
        """Send the state at intervals during loading."""
        if time.monotonic() - self._sent_state_at >= HEARTBEAT_INTERVAL:
            self.send_state()

    def _watch_folder(self, runner: ModelRunner) -> None:
        """Start the folder tier, and send its reports when its threads notify the loop."""
        folder = runner.offload and runner.offload.folder
        if not folder:
            return

        def send() -> None:
            while report := folder.take_report():
                report.epoch, report.rank = self._epoch, self._rank
                self.channel.send(report)

        folder.notify = self.make_notifier(send)
        folder.start()

    def make_notifier(self, handler: Callable[[], None]) -> Callable[[], None]:
        """Return a function that a thread calls to make the event loop call `handler`."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)

        def notify() -> None:
            with contextlib.suppress(BlockingIOError):
                os.write(writer, b"\0")

        def on_notice() -> None:
            os.read(reader, 4096)
            self.loop.add_file(reader, on_notice)
            handler()

        self.loop.add_file(reader, on_notice)
        return notify


def wait_for_ends(pids: list[int]) -> None:
    """Wait until processes have exited and freed their memory, up to MAX_END for each process."""
    for pid in pids:
        with (
            contextlib.suppress(ProcessLookupError),
            contextlib.closing(ProcessExit(pid)) as process,
        ):
            process.wait(MAX_END)


def free_rendezvous(host: str) -> str:
    """Return `tcp://host:port` with a free port at this machine's address `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return f"tcp://{host_and_port(host, port)}"


def use_interface_of(host: str, *, spans_nodes: bool) -> None:
    """Make gloo and NCCL use the network interface with address `host`.

    An interface that the user has chosen is kept. By default, gloo and NCCL use the first
    interface, which may not reach the peers, and gloo looks up this machine's name. On one machine
    NCCL needs no interface. Raises ConnectionError.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if spans_nodes:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
    raise ConnectionError(f"host: got {host}, expected an address of this machine's interfaces")
