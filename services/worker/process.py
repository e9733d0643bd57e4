"""The worker process: runs the plans that it receives, and sends their tokens."""

from collections import deque
from functools import partial
from typing import NamedTuple

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
)
from penstock.protocol.transport.process import Process
from penstock.services.worker.member import Load, Member, WorkerError
from penstock.services.worker.step.launched_step import LaunchedStep


class _Step(NamedTuple):
    number: int
    launched: LaunchedStep


class Worker(Member):
    """Steps of a member: launched in the order of their plans, answered in this order."""

    def __init__(self, process: Process, load: Load) -> None:
        super().__init__(process, load)
        self.loop.add(self.channel, self.receive)
        self._next_step = 0
        self._steps: deque[_Step] = deque()  # launched, their tokens not yet sent
        # reports that a thread has made
        self._compiled: deque[GrammarCompiled] = deque()
        self._notify_compiled = self.make_notifier(self._send_compiled)
        # steps that may run while the worker waits for a plan; one keeps the GPU busy
        self._max_running = min(1, process.config.num_plans_in_flight - 1)

    def receive(self) -> None:
        """Handle what waits at the socket. Raises WorkerError and what the runner raises."""
        for _, message in self.channel.receive():
            self._handle(message)
            while self._deferred_messages:
                self._handle(self._deferred_messages.popleft())
        self._wait()
        self.heartbeats.rest()

    def _handle(self, message: ToWorker) -> None:
        match message:
            case BatchPlan():
                self._run(message)
            case CopyBlocks() | FolderRequest():
                self._copy(message)
            case CompileGrammars():
                self._compile(message)
            case WorkerAssignment():
                self._take_place(message)
                if message.epoch > self._epoch:
                    self._begin(message.epoch)
            case WorkerExit(reason):
                raise WorkerError(f"the scheduler ended this worker: {reason}")

    def _begin(self, epoch: int) -> None:
        """Expect the plans of `epoch` from step 0, for an empty batch, and report it."""
        self._epoch, self._num_plans_before = epoch, self._next_step
        self._next_step = 0
        self._steps.clear()
        if self._runner:
            self._runner.clear()
        self.send_state()

    def _run(self, plan: BatchPlan) -> None:
        if plan.epoch < self._epoch:
            return
        if self._runner is None or plan.epoch > self._epoch:
            raise WorkerError(f"plan: got epoch {plan.epoch}, expected {self._epoch}")
        if plan.step != self._next_step:
            raise WorkerError(f"plan: got step {plan.step}, expected {self._next_step}")
        self._next_step += 1
        self.heartbeats.progress()
        self._steps.append(_Step(plan.step, self._runner.launch(plan)))
        self._send_done()

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
        """Let grammars be compiled during the steps."""
        if message.epoch < self._epoch:
            return
        grammars = self._runner and self._runner.logits_processor.grammars
        if not grammars:
            raise WorkerError("CompileGrammars: got grammars, expected them at rank 0 only")
        grammars.forget(message.removed)
        for number, spec in message.added:
            grammars.compile(number, spec, partial(self._on_compiled, message.epoch, number))

    def _on_compiled(self, epoch: int, number: int, num_bytes: int, error: str) -> None:
        """Leave the report to the loop; called by the thread that compiles."""
        self._compiled.append(GrammarCompiled(epoch, number, num_bytes, error))
        self._notify_compiled()

    def _send_compiled(self) -> None:
        while self._compiled:
            self.channel.send(self._compiled.popleft())

    def _send_done(self) -> None:
        while self._steps and self._steps[0].launched.done():
            self._send_oldest()

    def _wait(self) -> None:
        """Wait for the oldest step's tokens, because there is no other message."""
        while len(self._steps) > self._max_running and not self.channel.socket.poll(0):
            self._send_oldest()
        self._send_done()
        if self._steps:  # after the tokens for which the scheduler waits
            self._steps[-1].launched.complete()
            self._send_done()

    def _send_oldest(self) -> None:
        self.heartbeats.progress()
        step = self._steps.popleft()
        token_ids = step.launched.token_ids()
        if self._rank == 0:
            output = step.launched.output()
            self.channel.send(SampledTokens(self._epoch, step.number, pack(token_ids), *output))
