"""The scheduler's process: sockets around `Scheduler`, `WorkerGroup` and `Streams`."""

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
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.worker import (
    FolderReport,
    FromWorker,
    GrammarCompiled,
    WorkerExit,
    WorkerState,
)
from penstock.protocol.poison import REFUSED
from penstock.protocol.tokenizer_file import read_eos_token_ids, read_reasoning_tokens
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import DeathReports, HeartbeatThread
from penstock.protocol.transport.process import Process, first_number
from penstock.services.scheduler import report
from penstock.services.scheduler.factory import make_scheduler, use_host_tier
from penstock.services.scheduler.peers import poison
from penstock.services.scheduler.peers.detokenizer_recovery import RecoverableStreams
from penstock.services.scheduler.peers.lease import Lease
from penstock.services.scheduler.peers.worker_exits import WorkerExits
from penstock.services.scheduler.peers.worker_recovery import RecoverableScheduler
from penstock.services.scheduler.peers.workers import NO_GROUP, WorkerGroup, WorkerMessage
from penstock.services.scheduler.planning.in_flight_plan import PlanDepth
from penstock.services.scheduler.sequences.sequence import CannotFitError, Sequence

NOT_COMPILED = "structured_outputs: got one that the worker can't compile"


class SchedulerProcess:
    """Takes requests, keeps plans in flight, passes tokens on."""

    def __init__(self, process: Process) -> None:
        self.log, self.config = process.log, process.config
        self.epoch = first_number(process.incarnation)
        self.model = read_model_config(self.config.model_folder)
        self.eos_token_ids = frozenset(read_eos_token_ids(self.config.model_folder))
        self.reasoning_tokens = read_reasoning_tokens(self.config.model_folder)
        self.scheduler: RecoverableScheduler | None = None
        self.plan_depth = PlanDepth(self.config.num_plans_in_flight)
        self.replica = process.replica
        node, sizes = process.context.node_id, (self.config.tp, self.config.spare_workers)
        self.group = WorkerGroup(*sizes, self.replica, node, self.epoch + 1)
        self.streams = RecoverableStreams(self.epoch)
        # requests that the gateway has not released; they are queued once there is a scheduler
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
            HeartbeatThread(process, lambda: report.counters(self.scheduler, self.plan_bytes)),
        )
        self.worker_exits = WorkerExits(self.loop, node, self.lose_worker)
        self.loop.add(self.workers, self.on_workers)
        self.loop.add(self.inbox, self.on_requests)
        self.loop.add(self.detokenizers, self.on_detokenizers)

    def renew_epoch(self) -> None:
        """Act as a restarted scheduler, so that the gateway resubmits what may be lost."""
        self.epoch += 1

    def on_requests(self) -> None:
        for _, message in self.inbox.receive():
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
        self.advance()

    def accept(self, request: TokenizedRequest) -> None:
        """Queue a request, in place of another one of that id.

        A running one continues for the new attempt. Its output is sent again from the start, which
        a restarted gateway does not know. An attempt before the known one changes nothing.
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

    def queue(self, sequence: Sequence, scheduler: RecoverableScheduler) -> None:
        """Pass a request on to the scheduler, unless it can't be served."""
        try:
            sequence.check(self.model.vocab_size)
            scheduler.add(sequence)
        except CannotFitError as error:
            del self.requests[sequence.request_id]
            self.fail(sequence, error.reply)
        else:
            self.streams.open(sequence)

    def fail(self, sequence: Sequence, reply: ErrorReply, is_poison: bool = False) -> None:
        """Report to the gateway why a request can't be served."""
        self.gateway.send(RequestFailed(sequence.request_id, sequence.attempt, reply, is_poison))

    def release(self, request_id: str, attempt: int) -> None:
        sequence = self.requests.get(request_id)
        if sequence and sequence.attempt <= attempt:
            del self.requests[request_id]
            if self.scheduler:
                self.scheduler.finish(sequence, "abort")
            self.streams.close(sequence)
            if self.tracer.is_on:
                report.write_spans(self.tracer, sequence)
            if self.has_deaths:
                self.poison.remember(sequence)

    def on_workers(self) -> None:
        """Handle tokens of the oldest step, and heartbeats of workers."""
        for identity, message in self.workers.receive():
            if isinstance(message, WorkerState):
                self.on_worker_state(identity, message)
            elif isinstance(message, FolderReport):
                if self.scheduler and self.scheduler.offload:
                    self.scheduler.offload.on_report(message)
            elif identity in self.group.members[:1]:  # rank 0
                if isinstance(message, GrammarCompiled):
                    self.on_grammar(message)
                else:
                    self.on_tokens(message)
        self.send_step_tokens()  # before the next plan: the workers usually have others meanwhile
        self.advance()

    def on_grammar(self, message: GrammarCompiled) -> None:
        """Queue requests whose grammar is compiled; end those whose grammar can't be."""
        if self.scheduler and message.epoch == self.scheduler.epoch == self.group.epoch:
            for sequence in self.scheduler.on_compiled(message):
                self.give_up(sequence, f"{NOT_COMPILED} ({message.error})")

    def on_tokens(self, message: SampledTokens) -> None:
        """Add the tokens of a step; those of an older group are dropped and computed again."""
        if self.scheduler and message.epoch == self.scheduler.epoch == self.group.epoch:
            output = self.scheduler.update(message)
            if self.has_deaths:
                self.poison.clear()
            self.streams.put(output)
            self.plan_depth.on_tokens(monotonic())
            for sequence, reason in output.failed:
                self.give_up(sequence, reason)

    def on_worker_state(self, identity: bytes, state: WorkerState) -> None:
        """Assign the worker a place; when the last one is ready, plans can be sent."""
        if reason := refusal(state.name, state.version):
            self.workers.send(WorkerExit(reason), identity)
            return
        was_ready = self.group.ready
        self.worker_exits.watch(identity, state)
        self.send_to_workers(self.group.on_state(identity, state))
        if self.group.ready and not was_ready:
            self.start_group()
        if self.group.ready and self.scheduler and self.config.kv_offload_gib:
            use_host_tier(self.scheduler, self.config, self.replica, self.group)

    def send_to_workers(self, messages: list[WorkerMessage]) -> None:
        """Send messages to workers; a worker that can't be reached is lost."""
        for identity, message in messages:
            if not self.workers.send(message, identity):
                self.lose_worker(identity)

    def lose_worker(self, identity: bytes) -> None:
        messages = self.group.lost(identity)
        self.end_group()  # reports these members: a failed send would replace them
        self.send_to_workers(messages)

    def start_group(self) -> None:
        """Begin an epoch with a group of workers that is ready."""
        self.log.info("workers ready: %s", self.group)
        if self.scheduler is None:
            self.scheduler = make_scheduler(self.config, self.model, self.replica, self.group)
            for sequence in list(self.requests.values()):
                self.queue(sequence, self.scheduler)
        elif (number := self.group.num_blocks) < self.scheduler.block_manager.pool.num_blocks:
            raise SystemExit(f"num_blocks: the restarted workers have {number}, fewer than before")
        else:
            self.end_group()
            self.scheduler.begin(self.group.epoch, self.group.has_memory, self.group.memory_id)

    def end_group(self) -> None:
        """Forget the plans in flight if the workers died."""
        if self.scheduler and self.scheduler.epoch not in (NO_GROUP, self.group.epoch):
            self.has_deaths = True
            dead = [(one.name, one.pid) for one in self.group.members_before]
            self.poison.report_workers(dead, self.scheduler.at_risk)
            for sequence in self.scheduler.lose_plans():
                self.give_up(sequence, poison.WORKERS_DIED, is_poison=True)

    def give_up(self, sequence: Sequence, reason: str, is_poison: bool = False) -> None:
        """Fail a request that can't continue, or is poison; the others continue."""
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

    def advance(self) -> None:
        """Send every plan that may be sent, and then what detokenizers have to know."""
        if scheduler := self.scheduler:
            scheduler.max_plans = self.plan_depth.num_plans
        while scheduler and self.group.ready and scheduler.epoch == self.group.epoch:
            if frames := [self.workers.encode(one) for one in scheduler.next_messages()]:
                self.plan_bytes += sum(map(len, frames))
                for member in self.group.members:
                    if not all(self.workers.send_bytes(frame, member) for frame in frames):
                        self.lose_worker(member)
                        break
            # after the plan, for which all others may have been preempted before a suspect
            elif grammars := scheduler.next_grammars():
                self.send_to_workers([(self.group.members[0], grammars)])
            else:
                break
        self.send_step_tokens()
        if self.ready != self.reported_ready:
            self.send_status()

    def send_step_tokens(self) -> None:
        for identity, message in self.streams.take_messages():
            if not self.detokenizers.send(message, identity):
                self.lose_detokenizer(identity)

    def lose_detokenizer(self, identity: bytes) -> None:
        """Move its sequences to another detokenizer, now or when one registers."""
        name = identity.decode(errors="replace")
        self.log.warning("detokenizer %s is lost; moving its requests", name)
        self.has_deaths = True
        suspects, given_up = self.streams.lost(identity, has_died=True)
        self.poison.report_detokenizer(identity, suspects)
        for sequence in given_up:
            self.give_up(sequence, poison.DETOKENIZERS_DIED, is_poison=True)
        self.advance()

    def on_detokenizers(self) -> None:
        for identity, message in self.detokenizers.receive():
            if isinstance(message, Goodbye):
                self.streams.lost(identity)
            elif isinstance(message, Confirmed):
                self.streams.confirmed(identity)
            elif reason := refusal(message.name, message.version):
                self.detokenizers.send(Refused(reason), identity)
            elif self.streams.alive(identity, message.name):
                for dead in self.streams.predecessors(identity):
                    self.lose_detokenizer(dead)
        self.advance()

    def on_heartbeat(self) -> None:
        """Give up silent peers and unclaimed requests; report the status."""
        for identity in self.streams.lose_silent():
            self.log.warning("detokenizer %s is silent", identity.decode(errors="replace"))
        self.send_to_workers(self.group.heartbeat())
        for expired in self.lease.take_expired(self.requests.values(), monotonic()):
            self.release(expired.request_id, expired.attempt)
        self.advance()
        self.send_status()

    @property
    def ready(self) -> bool:
        return self.group.ready and len(self.streams.detokenizers) > 0

    def send_status(self) -> None:
        """Send the status to the gateway, which learns of a restart by the first one."""
        self.reported_ready = self.ready
        self.end_group()
        status = SchedulerStatus(epoch=self.epoch, ready=self.ready, replica=self.replica)
        status.first_attempt = self.lease.first_attempt
        unclaimed = self.lease.unclaimed(self.requests.values())
        status.unclaimed = [one.request_id for one in unclaimed]
        report.fill_status(status, self.scheduler, self.group, self.streams)
        self.gateway.send(status)
