"""The scheduler process: sockets around `Scheduler`, `WorkerGroup` and `Streams`."""

import contextlib
import math
from collections.abc import Callable, Iterable
from time import monotonic

import zmq

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.pipeline import (
    Confirmed,
    FromDetokenizer,
    GatewayStarted,
    Goodbye,
    Refused,
    ReleaseRequest,
    RequestFailed,
    StopFound,
    TokenizedRequest,
    ToScheduler,
    refusal,
)
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.worker import (
    CopyBlocks,
    FolderReport,
    FolderRequest,
    FromWorker,
    GrammarCompiled,
    WorkerExit,
    WorkerState,
)
from penstock.protocol.poison import REFUSED
from penstock.protocol.tokenizer_file import read_eos_token_ids, read_reasoning_tokens
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import traffic
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import DeathReports, HeartbeatThread
from penstock.protocol.transport.process import Process, ProcessExit, first_number
from penstock.services.scheduler import poison
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.block_records import BlockRecords
from penstock.services.scheduler.in_flight_plan import PlanDepth
from penstock.services.scheduler.scheduler import NO_GROUP, Scheduler
from penstock.services.scheduler.sequence import CannotFitError, Sequence
from penstock.services.scheduler.streams import Streams
from penstock.services.scheduler.workers import WorkerGroup, WorkerMessage

NOT_COMPILED = "structured_outputs: got one that the worker can't compile"


class SchedulerProcess:
    """The event handlers of the scheduler: requests, worker results, detokenizers."""

    def __init__(self, process: Process) -> None:
        self.log, self.config = process.log, process.config
        self.epoch = first_number(process.incarnation)
        self.model = read_model_config(self.config.model_folder)
        self.eos_token_ids = frozenset(read_eos_token_ids(self.config.model_folder))
        self.reasoning_tokens = read_reasoning_tokens(self.config.model_folder)
        self.scheduler: Scheduler | None = None
        self.plan_depth = PlanDepth(self.config.num_plans_in_flight)
        self.replica = process.replica
        node, sizes = process.context.node_id, (self.config.tp, self.config.spare_workers)
        self.group = WorkerGroup(*sizes, self.replica, node, self.epoch + 1)
        self.streams = Streams(self.epoch)
        # requests that the gateway has not released; queued once `self.scheduler` is set
        self.requests: dict[str, Sequence] = {}
        self.lease = Lease(self.config.lease_timeout)
        self.reported_ready, self.has_deaths, self.plan_bytes = False, False, 0
        self.poison = poison.SequencePoison(DeathReports(process))
        self.tracer = Tracer(self.config, process.name)
        context, endpoints = process.context, process.endpoints
        self.inbox = context.bind(zmq.PULL, endpoints.requests, ToScheduler)
        self.workers = context.bind(zmq.ROUTER, endpoints.workers, FromWorker)
        self.detokenizers = context.bind(zmq.ROUTER, endpoints.detokenizers, FromDetokenizer)
        self.gateway = context.connect(zmq.PUSH, endpoints.results, on_reconnect=self.renew_epoch)
        self.loop = EventLoop(
            process.context,
            self.on_heartbeat,
            HeartbeatThread(process, self.counters),
        )
        self.worker_exits = WorkerExits(self.loop, node, self.lose_worker)
        self.loop.add(self.workers, self.on_workers)
        self.loop.add(self.inbox, self.on_requests)
        self.loop.add(self.detokenizers, self.on_detokenizers)

    # ---- the turn: receive and process, schedule, forward --------------------------------------

    def on_requests(self) -> None:
        for _, message in self.inbox.receive():
            self.process_request(message)
        self.schedule()

    def on_workers(self) -> None:
        for identity, message in self.workers.receive():
            self.process_result(identity, message)
        self.send_tokens()  # before the next plan: workers usually have plans left
        self.schedule()

    def on_detokenizers(self) -> None:
        for identity, message in self.detokenizers.receive():
            self.process_detokenizer(identity, message)
        self.schedule()

    def schedule(self) -> None:
        """Send all plans that may be sent, then the messages to detokenizers."""
        if scheduler := self.scheduler:
            scheduler.max_plans = self.plan_depth.num_plans
        while scheduler and self.group.ready and scheduler.epoch == self.group.epoch:
            if messages := scheduler.next_messages():
                self.forward(messages)
            # after the plan, which may have preempted other sequences for a suspect
            elif grammars := scheduler.next_grammars():
                self.send_to_workers([(self.group.members[0], grammars)])
            else:
                break
        self.send_tokens()
        if self.ready != self.reported_ready:
            self.send_status()

    def forward(self, messages: list[BatchPlan | CopyBlocks | FolderRequest]) -> None:
        """Send a plan with its copies and folder request to each rank."""
        frames = [self.workers.encode(message) for message in messages]
        self.plan_bytes += sum(map(len, frames))
        for member in self.group.members:
            if not all(self.workers.send_bytes(frame, member) for frame in frames):
                self.lose_worker(member)
                break

    def send_tokens(self) -> None:
        """Send new tokens to detokenizers."""
        for identity, message in self.streams.take_messages():
            if not self.detokenizers.send(message, identity):
                self.lose_detokenizer(identity)

    # ---- requests ------------------------------------------------------------------------------

    def process_request(self, message: ToScheduler) -> None:
        match message:
            case TokenizedRequest():
                if message.attempt >= self.lease.first_attempt:
                    self.accept(message)
            case StopFound(request_id, attempt):
                sequence = self.requests.get(request_id)
                if sequence and sequence.attempt == attempt and self.scheduler:
                    self.scheduler.finish(sequence, "stop")
            case ReleaseRequest(request_id, attempt):
                self.release(request_id, attempt)
            case GatewayStarted(first_attempt):
                self.lease.begin(first_attempt, monotonic())
                self.send_status()

    def accept(self, request: TokenizedRequest) -> None:
        """Queue a request, or continue the known request with this id.

        If the known request has the same prompt and parameters, it continues for the new attempt.
        Its output is sent again from the start, because a restarted gateway does not have the
        output. A different known request is replaced. An older attempt changes nothing.
        """
        known = self.requests.get(request.request_id)
        if known and request.attempt < known.attempt:
            return
        if known and known.is_requested_by(request):
            known.attempt = request.attempt
            if self.scheduler:
                self.streams.reopen(known)
            return
        self.release(request.request_id, request.attempt)
        sequence = Sequence(request, self.eos_token_ids, self.reasoning_tokens)
        self.has_deaths |= sequence.num_deaths > 0
        if self.has_deaths and not self.poison.admits(sequence):
            self.fail(sequence, ErrorReply(code="failed", message=REFUSED), is_poison=True)
            return
        self.requests[request.request_id] = sequence
        if self.scheduler:
            self.queue(sequence, self.scheduler)

    def queue(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """Queue a request in the scheduler, or fail a request that can't be served."""
        try:
            sequence.check(self.model.vocab_size)
            scheduler.add(sequence)
        except CannotFitError as error:
            del self.requests[sequence.request_id]
            self.fail(sequence, error.reply)
        else:
            self.streams.open(sequence)

    def fail(self, sequence: Sequence, reply: ErrorReply, is_poison: bool = False) -> None:
        """Report a failed request to the gateway."""
        self.gateway.send(RequestFailed(sequence.request_id, sequence.attempt, reply, is_poison))

    def release(self, request_id: str, attempt: int) -> None:
        sequence = self.requests.get(request_id)
        if sequence and sequence.attempt <= attempt:
            del self.requests[request_id]
            if self.scheduler:
                self.scheduler.finish(sequence, "abort")
            self.streams.close(sequence)
            if self.tracer.is_on:
                write_spans(self.tracer, sequence)
            if self.has_deaths:
                self.poison.remember(sequence)

    def give_up(self, sequence: Sequence, reason: str, is_poison: bool = False) -> None:
        """Fail and release a request that can't continue, or a poison request."""
        error = ErrorReply(code="failed", message=reason)
        if reason.startswith("structured_outputs:"):
            error = ErrorReply(code="invalid", message=reason, field="structured_outputs")
        else:
            name = sequence.request_id
            self.log.error("%s: %s", name, reason, extra={"request_id": name})
        self.fail(sequence, error, is_poison)
        self.release(sequence.request_id, sequence.attempt)
        if is_poison:
            self.poison.report_found(sequence)

    # ---- workers -------------------------------------------------------------------------------

    def process_result(self, identity: bytes, message: FromWorker) -> None:
        """Handle a worker's message."""
        if isinstance(message, WorkerState):
            self.on_worker_state(identity, message)
        elif isinstance(message, FolderReport):
            if self.scheduler:
                self.scheduler.block_manager.on_report(message)
        elif identity in self.group.members[:1]:  # rank 0
            if isinstance(message, GrammarCompiled):
                self.on_grammar(message)
            else:
                self.on_tokens(message)

    def on_grammar(self, message: GrammarCompiled) -> None:
        """Queue requests whose grammar is compiled. Fail requests whose grammar has an error."""
        if self.scheduler and message.epoch == self.scheduler.epoch == self.group.epoch:
            for sequence in self.scheduler.on_compiled(message):
                self.give_up(sequence, f"{NOT_COMPILED} ({message.error})")

    def on_tokens(self, message: SampledTokens) -> None:
        """Add the tokens of a step. Drop tokens of an older group, which are computed again."""
        if self.scheduler and message.epoch == self.scheduler.epoch == self.group.epoch:
            output = self.scheduler.update(message)
            if self.has_deaths:
                self.poison.clear()
            self.streams.put(output)
            if output.is_step:
                self.plan_depth.on_tokens(monotonic())
            self.scheduler.draft_scheduler.on_tokens(monotonic())
            for sequence, reason in output.failed:
                self.give_up(sequence, reason)

    def on_worker_state(self, identity: bytes, state: WorkerState) -> None:
        """Record a worker's state. Start the group when its last worker is ready."""
        if reason := refusal(state.name, state.version):
            self.workers.send(WorkerExit(reason), identity)
            return
        was_ready = self.group.ready
        self.worker_exits.watch(identity, state)
        self.send_to_workers(self.group.on_state(identity, state))
        if self.group.ready and not was_ready:
            self.start_group()
        if self.group.ready and self.scheduler and self.config.kv_offload_gib:
            self.scheduler.block_manager.use_host_tier(
                self.config, self.replica, self.group.epoch, *self.group.host_tier
            )

    def send_to_workers(self, messages: list[WorkerMessage]) -> None:
        """Send messages to workers. Treat a worker that can't be reached as lost."""
        for identity, message in messages:
            if not self.workers.send(message, identity):
                self.lose_worker(identity)

    def lose_worker(self, identity: bytes) -> None:
        messages = self.group.lost(identity)
        self.end_group()  # report the dead members before a failed send replaces them
        self.send_to_workers(messages)

    def start_group(self) -> None:
        """Begin an epoch with a worker group that is ready."""
        self.log.info("workers ready: %s", self.group)
        if self.scheduler is None:
            self.scheduler = self.make_scheduler()
            for sequence in list(self.requests.values()):
                self.queue(sequence, self.scheduler)
        else:
            for name in ("num_blocks", "num_state_blocks"):
                number = getattr(self.group, name)
                if number < getattr(self.scheduler.block_manager, name):
                    raise SystemExit(
                        f"{name}: the restarted workers have {number}, fewer than before"
                    )
            self.end_group()
            memory = self.group.has_memory, self.group.memory_id, self.group.state_ranges
            self.scheduler.begin(self.group.epoch, *memory)

    def make_scheduler(self) -> Scheduler:
        """Return a scheduler for a ready worker group, with recovered prefix-cache records."""
        config, memory_id = self.config, self.group.memory_id
        num_blocks, block_size = self.group.num_blocks, self.group.leader.block_size
        records = BlockRecords.open(f"blocks.{self.replica}", num_blocks, block_size, memory_id)
        states = None
        if number := self.group.num_state_blocks:
            checkpoints = BlockRecords.open(f"states.{self.replica}", number, 0, memory_id)
            states = BlockPool(number, records=checkpoints)
        pool, watermark = BlockPool(num_blocks, records=records), int(num_blocks * config.watermark)
        sizes = block_size, watermark, config.enable_prefix_caching
        per_state = self.group.leader.blocks_per_state
        blocks = BlockManager(pool, *sizes, states, per_state)
        length = self.model.context(config.max_model_len)
        scheduler = Scheduler(config, length, blocks, self.group.epoch)
        scheduler.step_costs.is_timed = True
        scheduler.step_costs.sizes = self.group.leader.step_sizes
        scheduler.step_costs.tiles = self.group.leader.tile_sizes
        return scheduler

    def end_group(self) -> None:
        """Drop the plans in flight after a worker failure. Fail poison requests."""
        if self.scheduler and self.scheduler.epoch not in (NO_GROUP, self.group.epoch):
            self.has_deaths = True
            dead = [(worker.name, worker.pid) for worker in self.group.members_before]
            self.poison.report_workers(dead, self.scheduler.at_risk)
            for sequence in self.scheduler.lose_plans():
                self.give_up(sequence, poison.WORKERS_DIED, is_poison=True)

    # ---- detokenizers --------------------------------------------------------------------------

    def process_detokenizer(self, identity: bytes, message: FromDetokenizer) -> None:
        if isinstance(message, Goodbye):
            self.streams.lost(identity)
        elif isinstance(message, Confirmed):
            self.streams.confirmed(identity)
        elif reason := refusal(message.name, message.version):
            self.detokenizers.send(Refused(reason), identity)
        elif self.streams.alive(identity, message.name):
            for dead in self.streams.detokenizers.predecessors(identity):
                self.lose_detokenizer(dead)

    def lose_detokenizer(self, identity: bytes) -> None:
        """Move the sequences of a dead detokenizer to others, now or when one registers."""
        name = identity.decode(errors="replace")
        self.log.warning("detokenizer %s is lost; moving its requests", name)
        self.has_deaths = True
        suspects, given_up = self.streams.lost(identity, has_died=True)
        self.poison.report_detokenizer(identity, suspects)
        for sequence in given_up:
            self.give_up(sequence, poison.DETOKENIZERS_DIED, is_poison=True)
        self.schedule()

    # ---- heartbeats and status -----------------------------------------------------------------

    def renew_epoch(self) -> None:
        """Act as a restarted scheduler, so that the gateway resubmits requests that may be lost."""
        self.epoch += 1

    def on_heartbeat(self) -> None:
        """Drop silent peers, release requests with an expired lease, and send the status."""
        for identity in self.streams.lose_silent():
            self.log.warning("detokenizer %s is silent", identity.decode(errors="replace"))
        self.send_to_workers(self.group.heartbeat())
        for expired in self.lease.take_expired(self.requests.values(), monotonic()):
            self.release(expired.request_id, expired.attempt)
        self.schedule()
        self.send_status()

    @property
    def ready(self) -> bool:
        return self.group.ready and len(self.streams.detokenizers) > 0

    def send_status(self) -> None:
        """Send the status to the gateway, which detects a restart by a new epoch."""
        self.reported_ready = self.ready
        self.end_group()
        status = SchedulerStatus(epoch=self.epoch, ready=self.ready, replica=self.replica)
        status.first_attempt = self.lease.first_attempt
        unclaimed = self.lease.unclaimed(self.requests.values())
        status.unclaimed = [sequence.request_id for sequence in unclaimed]
        status.detokenizers = {peer.name: len(peer.work) for peer in self.streams.detokenizers}
        status.workers = self.group.names
        status.num_bad_frames = traffic.bad_frames
        status.workers_ready, status.awaits_workers = self.group.ready, self.group.is_awaited
        if self.scheduler:
            self.add_load(status, self.scheduler)
        self.gateway.send(status)

    def add_load(self, status: SchedulerStatus, scheduler: Scheduler) -> None:
        """Add the numbers of requests, blocks and steps to the status."""
        blocks = scheduler.block_manager
        status.gpu_idle_us = self.group.idle_us
        if not self.group.ready:
            open_ones = [*scheduler.waiting, *scheduler.grammars.waiting, *scheduler.running]
            status.num_deaths = {
                sequence.request_id: sequence.num_deaths
                for sequence in open_ones
                if sequence.num_deaths
            }
        status.num_waiting = scheduler.num_waiting
        status.num_running = len(scheduler.running)
        status.num_blocks = blocks.num_blocks
        status.num_free_blocks = blocks.num_free_blocks
        status.num_steps = scheduler.num_steps
        status.num_preemptions = scheduler.num_preemptions
        status.num_recomputed_tokens = scheduler.num_recomputed_tokens
        if offload := blocks.offload:
            status.num_offloaded_blocks = offload.num_blocks
            status.num_offload_hits = offload.num_loaded * blocks.block_size
            status.num_files = offload.folder.num_files if offload.folder else 0
        if self.config.kv_offload_folder:
            status.num_unsaved_blocks = blocks.num_unsaved_blocks
        status.block_size = blocks.block_size
        status.step_tokens = scheduler.step_tokens

    def counters(self) -> dict[str, float]:
        """Return metrics. The queue age is the wait of the first request in seconds, or 0."""
        head = next(iter(self.scheduler.waiting), None) if self.scheduler else None
        age = monotonic() - head.arrived_at if head else 0.0
        drafts = self.scheduler.draft_scheduler.counters() if self.scheduler else {}
        return {"plan_bytes_total": self.plan_bytes, "queue_age_seconds": age, **drafts}


def write_spans(tracer: Tracer, sequence: Sequence) -> None:
    """Write the trace spans `queue`, `prefill` and `decode` of a released sequence.

    Preemptions and worker failures begin no new span.
    """
    moments = {
        "queue": sequence.arrived_at,
        "prefill": sequence.scheduled_at,
        "decode": sequence.first_token_at,
    }
    attributes = {"gen_ai.usage.output_tokens": len(sequence.output_token_ids)}
    begun = [(name, begin) for name, begin in moments.items() if begin]
    ends = [begin for _, begin in begun[1:]]
    for (name, begin), end in zip(begun, [*ends, monotonic()], strict=True):
        tracer.span(name, sequence.request_id, begin, attributes, end=end)


class Lease:
    """The lease on the running requests of an earlier gateway.

    `now` is the time of a monotonic clock in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.first_attempt = 0  # the newest gateway's; lower attempts are unclaimed
        self._timeout = timeout
        self._end = math.inf

    def begin(self, first_attempt: int, now: float) -> None:
        """Begin the lease at a gateway's start, unless a newer gateway is known."""
        if first_attempt > self.first_attempt:
            self.first_attempt = first_attempt
            self._end = now + self._timeout

    def unclaimed(self, requests: Iterable[Sequence]) -> list[Sequence]:
        """Return the requests under the lease, which no client has claimed."""
        if self._end == math.inf:
            return []
        return [sequence for sequence in requests if sequence.attempt < self.first_attempt]

    def take_expired(self, requests: Iterable[Sequence], now: float) -> list[Sequence]:
        """End the lease after its timeout. Return the unclaimed requests, once."""
        if now < self._end:
            return []
        expired = self.unclaimed(requests)
        self._end = math.inf
        return expired


class WorkerExits:
    """A watch for worker exits on this machine, which is faster than missed heartbeats."""

    def __init__(self, loop: EventLoop, node: str, on_exit: Callable[[bytes], None]) -> None:
        """Watch workers of `node`. Call `on_exit` with the identity of a worker that exits."""
        self._loop = loop
        self._node = node
        self._on_exit = on_exit
        self._watched: set[bytes] = set()

    def watch(self, identity: bytes, state: WorkerState) -> None:
        """Watch a worker's process, unless it is already watched or on another machine."""
        if identity in self._watched or state.node != self._node or state.pid <= 0:
            return
        with contextlib.suppress(OSError):  # the worker has exited, or no descriptor is left
            process = ProcessExit(state.pid)
            self._watched.add(identity)

            def exited() -> None:
                process.close()
                self._watched.discard(identity)
                self._on_exit(identity)

            self._loop.add_file(process.fileno(), exited)
