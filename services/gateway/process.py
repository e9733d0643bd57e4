"""The gateway's process: sockets around the ledger."""

import signal
import time
from functools import partial
from typing import Any

import zmq

from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.detokenizer import TextDeltas
from penstock.protocol.messages.gateway import ToGateway
from penstock.protocol.messages.registration import Goodbye, Heartbeat, Refused
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus, StatusReply
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.messages.tokenizer import (
    FromTokenizer,
    RequestFailed,
    TokenizeDone,
    TokenizerReply,
)
from penstock.protocol.poison import DeathReports
from penstock.protocol.replicas import replica_of
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.heartbeat import refusal
from penstock.protocol.transport.process import Process, first_number
from penstock.services.gateway.authentication import bind_clients
from penstock.services.gateway.connections import Connections
from penstock.services.gateway.delivery import Outbox
from penstock.services.gateway.dispatch import Dispatch
from penstock.services.gateway.entry import Entry
from penstock.services.gateway.given_up import GivenUp
from penstock.services.gateway.incoming import Incoming
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.monitor import Monitor
from penstock.services.gateway.poison import Poison
from penstock.services.gateway.requests import DEFECT, Requests
from penstock.services.gateway.router import Replicas
from penstock.services.gateway.status_queries import StatusQueries
from penstock.services.gateway.tokenizer_queries import OpenQuestion, Questions
from penstock.services.gateway.tokenizers import Tokenizers

LAST_WORDS = 1.0
"""seconds at the end of a drain: a client that uses ZMQ_IMMEDIATE, as ours does, discards what it
has not read when its connection is closed"""


class Gateway:
    """Answers clients; gives requests to tokenizers; collects text from detokenizers."""

    def __init__(self, process: Process, call_later: CallLater) -> None:
        self.log = process.log
        self.config = config = process.config
        self.processes: list[ProcessStatus] = []
        """of the supervisor's newest report; it can't end before this process"""
        self.was_ready = self.has_drained = False
        self.call_later = call_later
        context, at = process.context, process.endpoints
        self.connections = Connections()
        self.monitor = Monitor(context, self.connections)
        self.clients = bind_clients(context, config, self.monitor, at.inner_clients)
        self.to_tokenizers = context.bind(zmq.ROUTER, at.tokenizers, FromTokenizer)
        self.results = context.bind(zmq.PULL, at.results, ToGateway)
        self.to_schedulers: list[Channel[Any]] = [
            context.connect(zmq.PUSH, one.requests, on_return=partial(self.on_return, replica))
            for replica, one in enumerate(process.all_endpoints)
        ]
        self.replicas = Replicas(config.dp, config.routing)
        self.ledger = Ledger(first_number(process.incarnation))
        self.outbox = Outbox(self.clients, self.ledger, self.connections, config)
        self.incoming = Incoming(self.clients, self.connections, self.monitor, config)
        self.poison = Poison(DeathReports(process))
        self.status_queries = StatusQueries(self.outbox, self.status)
        self.tokenizers = Tokenizers(
            self.to_tokenizers,
            self.poison,
            self.tell_ready,
            self.on_tokenizer_lost,
            self.on_defect,
            lambda work: self.given_up.on_poison(work),
        )
        self.questions = Questions(self.ledger.first_attempt, self.outbox, self.tokenizers)
        self.requests = Requests(
            config,
            self.ledger,
            self.connections,
            self.outbox,
            self.tokenizers,
            self.questions,
            self.replicas,
            Tracer(config, process.name),
            self.to_schedulers,
            call_later,
            self.monitor.disconnect,
        )
        self.given_up = GivenUp(self.poison, self.requests, self.questions, self.replicas)
        self.statistics = self.requests.statistics
        for replica in range(config.dp):
            self.requests.introduce(replica, self.ledger.first_attempt)
        self.dispatch = Dispatch(
            self.incoming, self.requests, self.outbox, self.status_queries, self.poison
        )
        self.handlers = [
            (self.results, self.on_results),
            (self.to_tokenizers, self.on_tokenizers),
            (self.clients, lambda: self.dispatch.handle(self.ready)),
            (self.monitor.channel, self.monitor.handle),
            *context.handlers,
        ]

    def end_drain_if_idle(self) -> None:
        """End the process if the pipeline is draining and no request is open."""
        is_idle = not (self.ledger or self.questions)
        if self.requests.drain.is_on and is_idle and not self.replicas.await_claims:
            self.end_drain()

    def end_drain(self) -> None:
        """Ends the process; while clients are connected, after LAST_WORDS."""
        if self.has_drained:
            return
        self.has_drained = True
        end = partial(signal.raise_signal, signal.SIGTERM)
        if len(self.connections):
            self.call_later(LAST_WORDS, end)
        else:
            end()

    # ---- tokenizers --------------------------------------------------------------------------

    def on_tokenizers(self) -> None:
        """Requests that are with the scheduler now, refused prompts, heartbeats."""
        for identity, message in self.to_tokenizers.receive():
            match message:
                case Heartbeat():
                    self.on_heartbeat_of(identity, message)
                case Goodbye():
                    self.tokenizers.lose(identity, has_died=False)
                case TokenizeDone() | RequestFailed():
                    self.tokenizers.done(identity, (message.request_id, message.attempt))
                    self.on_tokenized(identity, message)
                case TokenizerReply():
                    self.tokenizers.done(identity, message.number)
                    self.questions.answer(message)
                    if isinstance(message.reply, ErrorReply):
                        self.statistics.failed(message.reply)

    def on_heartbeat_of(self, identity: bytes, message: Heartbeat) -> None:
        """Registers a new tokenizer, or refuses it."""
        if reason := refusal(message):
            self.to_tokenizers.send(Refused(reason), identity)
        else:
            self.tokenizers.alive(identity, message.name)

    def on_tokenized(self, identity: bytes, message: TokenizeDone | RequestFailed) -> None:
        """A tokenizer is done with a request."""
        entry = self.ledger.get(message.request_id)
        if entry is None:  # ended meanwhile: the scheduler must not go on with it
            self.requests.release_unknown(message.request_id, message.attempt)
        elif isinstance(message, RequestFailed):
            if message.attempt == entry.attempt:
                self.requests.fail(entry, message.error)
        else:
            self.requests.release_left(entry, message.attempt)
            self.ledger.tokenized(entry, message.num_prompt_tokens)
            entry.tokenizer = identity

    def on_tokenizer_lost(self, identity: bytes) -> None:
        """What it said it had passed on may have died with it."""
        self.requests.each(self.ledger.from_tokenizer(identity), self.requests.again)

    def on_defect(self, work: Entry | OpenQuestion) -> None:
        """Work that can't be sent to a tokenizer is failed, alone."""
        if isinstance(work, Entry):
            self.requests.on_defect(work)
        else:
            self.questions.fail(work, DEFECT)

    # ---- results -----------------------------------------------------------------------------

    def on_results(self) -> None:
        """Text from detokenizers; failures and news from the scheduler."""
        for _, message in self.results.receive():
            match message:
                case TextDeltas(deltas):
                    self.requests.on_deltas(deltas, time.monotonic())
                case RequestFailed():
                    entry = self.ledger.get(message.request_id)
                    if entry and entry.attempt == message.attempt:
                        self.given_up.on_failed(entry, message)
                case SchedulerStatus():
                    self.on_scheduler(message)
                case SupervisorReport(processes, draining):
                    self.requests.drain.is_on |= draining
                    self.on_report(processes)

    def on_report(self, processes: list[ProcessStatus]) -> None:
        """Which processes run. What a scheduler had that does not goes on in other replicas."""
        self.processes = processes
        schedulers = [one.name for one in processes if one.name.startswith("scheduler.")]
        self.replicas.reported({replica_of(name, self.config) for name in schedulers})
        self.requests.migrate_lost()

    def on_scheduler(self, status: SchedulerStatus) -> None:
        """A new epoch is a new scheduler, which knows nothing: its requests are submitted again.

        So they are to the first one: what was accepted before may have gone to one that is dead.
        """
        is_new = self.replicas.heard(status)
        if is_new is None:
            return
        if is_new:
            self.requests.resubmit_all(status.replica)
        self.requests.migrate_lost()
        self.tell_ready()
        self.status_queries.on_report(status.replica, self.replicas.are_all)

    def on_return(self, replica: int) -> None:
        """The connection to a scheduler was lost and is back, so messages may be lost: it is told
        all that is open once more, and forgets what is not."""
        self.requests.introduce(replica, self.ledger.new_first_attempt())
        self.requests.resubmit_all(replica)

    # ---- status ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Every stage is there."""
        return self.replicas.ready and len(self.tokenizers.peers) > 0

    def tell_ready(self) -> None:
        """Answers those who wait for it, when it becomes so."""
        was_ready, self.was_ready = self.was_ready, self.ready
        if self.ready and not was_ready:
            self.status_queries.on_ready()

    def status(self, metrics: bool = False) -> StatusReply:
        """The pipeline as seen from here."""
        return StatusReply(
            ready=self.ready,
            model=str(self.config.model_folder),
            num_requests=len(self.ledger),
            tokenizers={peer.name: len(peer.work) for peer in self.tokenizers.peers},
            schedulers=self.replicas.statuses,
            num_bad_frames=sum(channel.num_bad_frames for channel, _ in self.handlers),
            draining=self.requests.drain.is_on,
            processes=self.processes,
            metrics=self.statistics.metrics if metrics else None,
        )

    def counters(self) -> dict[str, float]:
        """What this process counts about itself, for its pulses."""
        return {
            "open_requests": self.ledger.num_open,
            "open_questions": len(self.questions),
            "connections": len(self.connections),
            "disconnected_clients_total": self.monitor.num_disconnected,
        }

    def on_heartbeat(self) -> None:
        """Gives up whoever is silent, and clients that are gone or do not read."""
        for identity in self.tokenizers.peers.silent():
            self.tokenizers.lose(identity)
        self.replicas.on_heartbeat()
        self.requests.migrate_lost()
        self.monitor.handle()
        self.requests.on_heartbeat()
        self.incoming.on_heartbeat()
        self.status_queries.on_heartbeat()
