"""The worker's place: its rank in a group, which the scheduler assigns, or in a standby group."""

import contextlib
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable

import psutil
import torch
import zmq

from penstock.protocol.config import Config
from penstock.protocol.messages.worker import ToWorker, WorkerAssignment, WorkerState
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import host_and_port
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process
from penstock.protocol.transport.process_exit import ProcessExit
from penstock.services.worker.memory.persistent_memory import SharedMemoryError
from penstock.services.worker.model_runner import ModelRunner

MAX_END = 5.0  # maximum seconds in which a killed worker ends
# makes the runner of a rank; calls the last argument repeatedly meanwhile
Load = Callable[[Config, WorkerAssignment, Callable[[], None]], ModelRunner]


class WorkerError(Exception):
    """An error after which the worker exits."""


class Member:
    """A worker as a member of a group: it registers, loads its rank, and reports its state."""

    def __init__(self, process: Process, load: Load) -> None:
        self.channel = process.context.connect(
            zmq.DEALER, process.endpoints.workers, ToWorker, process.identity
        )
        self._process = process
        self._load = load
        self.heartbeats = HeartbeatThread(process, self._counters)
        self.loop = EventLoop(process.context, self.send_state)
        self._runner: ModelRunner | None = None
        self._group = ""
        self._rank = -1
        self._epoch = -1
        self._num_plans_before = 0
        self._sent_state_at = 0.0
        self._is_standby = self._is_prepared = False
        # messages that came while graphs were captured
        self._deferred_messages: deque[ToWorker] = deque()

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
            if offload := self._runner.offload:
                state.host_slots, state.host_memory_id = offload.num_slots, offload.memory_id
                if offload.folder:
                    offload.folder.check_time()
        self.channel.send(state)
        self.heartbeats.sender.count()
        self._sent_state_at = time.monotonic()

    def _new_rendezvous(self) -> str:
        """Return where the ranks of a group find each other.

        CPUs of one machine meet in a file: an address makes torch look up its host's name, which
        waits and warns where no name server answers.
        """
        context, config = self._process.context, self._process.config
        if context.node_id or (config.device != "cpu" and torch.cuda.is_available()):
            return free_rendezvous(context.host)
        return f"file://{config.run_folder}/rendezvous-{uuid.uuid4().hex}"

    def _counters(self) -> dict[str, float]:
        return {"standby_ready": float(self._is_standby and self._is_prepared)}

    def _take_place(self, assignment: WorkerAssignment) -> None:
        """Load the rank, or take over from the worker before. Raises WorkerError."""
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
            self.heartbeats.report()  # before it waits for the other ranks
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
            raise WorkerError("the standby group was not prepared")  # other ranks may be
        self._is_standby = False
        self._process.log.info("rank %d of %d: loading", assignment.rank, assignment.tp_size)
        wait_for_ends(assignment.pids_before)
        self._runner = self._load(self._process.config, assignment, self._on_progress)
        self._watch_folder(self._runner)

    def _prepare(self, assignment: WorkerAssignment) -> None:
        """Load what a rank shares with the worker that runs, and capture graphs until it dies."""
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
        """Return whether a message other than its standby assignment waits for this worker.

        Ranks of one group capture the same graphs.
        """
        messages = self._deferred_messages
        messages.extend(message for _, message in self.channel.receive())
        return tp_size == 1 and any(
            not (isinstance(one, WorkerAssignment) and one.standby) for one in messages
        )

    def _on_progress(self) -> None:
        """Send the state during loading, which may take long."""
        if time.monotonic() - self._sent_state_at >= HEARTBEAT_INTERVAL:
            self.send_state()

    def _watch_folder(self, runner: ModelRunner) -> None:
        """Send reports of the folder, whose threads write to a pipe when there is one."""
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
        """Return a function with which a thread has the loop call `handler` soon."""
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
    """Wait until processes have exited and freed their memory, each up to MAX_END."""
    for pid in pids:
        with (
            contextlib.suppress(ProcessLookupError),
            contextlib.closing(ProcessExit(pid)) as process,
        ):
            process.wait(MAX_END)


def free_rendezvous(host: str) -> str:
    """Return `tcp://host:port` with a port of this machine's address that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return f"tcp://{host_and_port(host, port)}"


def use_interface_of(host: str, *, spans_nodes: bool) -> None:
    """Make gloo and NCCL use the interface with this machine's address, unless the user chose one.

    By default they use the first interface, which may not reach the peers, and gloo looks up this
    machine's name. On one machine NCCL needs no interface. Raises ConnectionError.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == host for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if spans_nodes:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
    raise ConnectionError(f"host: got {host}, expected an address of this machine's interfaces")
