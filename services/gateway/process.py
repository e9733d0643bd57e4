"""The gateway's process: its sockets, and the handler of each message."""

import signal
import time
from functools import partial
from typing import Any

import zmq

from penstock.protocol.config import replica_of
from penstock.protocol.messages.client import (
    AbortReply,
    AbortRequest,
    DetokenizeRequest,
    ErrorReply,
    GenerateRequest,
    Request,
    StatusRequest,
    TokenizePromptRequest,
)
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
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import Handlers
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.peers import refusal
from penstock.protocol.transport.process import Process, first_number
from penstock.services.gateway.client_socket import ClientSocket
from penstock.services.gateway.connections import Client
from penstock.services.gateway.ledger import Ledger, Totals
from penstock.services.gateway.requests import Requests
from penstock.services.gateway.router import Router
from penstock.services.gateway.status_queries import StatusQueries
from penstock.services.gateway.validation import RefusedError

LAST_WORDS = 1.0
"""seconds at the end of a drain: a client with ZMQ_IMMEDIATE, as ours, discards unread replies when
its connection is closed"""


class Gateway:
    """Connects clients, tokenizers, schedulers and detokenizers."""

    def __init__(self, process: Process, call_later: CallLater) -> None:
        self.config = config = process.config
        self.processes: list[ProcessStatus] = []  # of the supervisor's newest report
        self.was_ready = self.has_drained = False
        self.call_later = call_later
        context, at = process.context, process.endpoints
        self.ledger = Ledger(Totals(), first_number(process.incarnation))
        self.clients = ClientSocket(context, config, at.inner_clients, self.ledger)
        self.connections = self.clients.connections
        self.to_tokenizers = context.bind(zmq.ROUTER, at.tokenizers, FromTokenizer)
        self.results = context.bind(zmq.PULL, at.results, ToGateway)
        to_schedulers: list[Channel[Any]] = [
            context.connect(zmq.PUSH, one.requests, on_return=partial(self.on_return, replica))
            for replica, one in enumerate(process.all_endpoints)
        ]
        self.router = Router(to_schedulers, config.routing, self.ledger.first_attempt)
        self.requests = Requests(
            process, self.ledger, self.clients, self.to_tokenizers, self.router, call_later
        )
        self.tokenizers, self.metrics = self.requests.tokenizers, self.requests.metrics
        self.status_queries = StatusQueries(self.clients, self.status)
        for replica in range(config.dp):
            self.router.introduce(replica, self.ledger.first_attempt)
        self.handlers: Handlers = [
            (self.results, self.on_results),
            (self.to_tokenizers, self.on_tokenizers),
            (self.clients.channel, self.on_clients),
            (self.connections.monitor, self.connections.handle_events),
            *context.handlers,
        ]

    def after_turn(self) -> None:
        """Answer requests that waited for readiness. End the process when it has drained."""
        was_ready, self.was_ready = self.was_ready, self.is_ready
        if self.was_ready > was_ready:
            self.status_queries.on_ready()
        is_idle = not (self.ledger or self.requests.queries)
        must_wait = self.has_drained or self.router.awaits_claims
        if self.requests.is_draining and is_idle and not must_wait:
            self.has_drained = True
            end = partial(signal.raise_signal, signal.SIGTERM)
            if len(self.connections):
                self.call_later(LAST_WORDS, end)
            else:
                end()

    def on_clients(self) -> None:
        """Handle requests; an error is reported to the sender alone."""
        for client, frame in self.clients.receive():
            try:
                request = self.requests.validation.decode(client.codec, frame)
                client = self.connections.named_client(client, getattr(request, "client", None))
                self.on_request(client, request, len(frame))
            except RefusedError as error:
                self.metrics.count_failure(error.reply.code)
                self.clients.reply(client, error.reply)

    def on_request(self, client: Client, request: Request, num_bytes: int) -> None:
        match request:
            case GenerateRequest():
                self.requests.submit(client, request, num_bytes)
            case TokenizePromptRequest() | DetokenizeRequest():
                self.requests.submit_query(client, request, num_bytes)
            case AbortRequest():
                found = self.requests.abort(client, request.request_id)
                self.clients.reply(client, AbortReply(request_id=request.request_id, found=found))
            case StatusRequest():
                self.status_queries.submit(client, request, self.is_ready)

    def on_tokenizers(self) -> None:
        for identity, message in self.to_tokenizers.receive():
            match message:
                case Heartbeat():
                    if reason := refusal(message):
                        self.to_tokenizers.send(Refused(reason), identity)
                    else:
                        self.tokenizers.alive(identity, message.name)
                case Goodbye():
                    self.tokenizers.lose(identity, has_died=False)
                case TokenizeDone(request_id, attempt, num_tokens):
                    self.tokenizers.done(identity, (request_id, attempt))
                    self.requests.on_tokenized(request_id, attempt, num_tokens, identity)
                case RequestFailed():
                    self.tokenizers.done(identity, (message.request_id, message.attempt))
                    self.requests.on_failed(message)
                case TokenizerReply():
                    self.tokenizers.done(identity, message.number)
                    self.requests.queries.answer(message)
                    if isinstance(message.reply, ErrorReply):
                        self.metrics.count_failure(message.reply.code)

    def on_results(self) -> None:
        for _, message in self.results.receive():
            match message:
                case TextDeltas(deltas):
                    self.requests.on_deltas(deltas, time.monotonic())
                case RequestFailed():
                    self.requests.on_failed(message)
                case SchedulerStatus():
                    self.on_scheduler(message)
                case SupervisorReport():
                    self.on_report(message)

    def on_report(self, report: SupervisorReport) -> None:
        """Take in which processes run; requests of a scheduler that does not run are migrated."""
        self.requests.is_draining |= report.draining
        if not self.processes:  # the first report: this gateway may have restarted
            self.requests.poison.learn(report.poison)
        self.processes = report.processes
        names = [one.name for one in self.processes if one.name.startswith("scheduler.")]
        self.router.take_running({replica_of(name, self.config) for name in names})
        self.requests.migrate_stranded()

    def on_scheduler(self, status: SchedulerStatus) -> None:
        """Resubmit the requests of a scheduler of a new epoch; the first epoch is new, too."""
        has_restarted = self.router.take_status(status)
        if has_restarted is None:
            return
        if has_restarted:
            self.requests.resubmit_all(status.replica)
        self.requests.migrate_stranded()
        self.status_queries.on_report(status.replica, self.router)

    def on_return(self, replica: int) -> None:
        """Resubmit all requests of a scheduler that reconnected; it forgets all others."""
        self.router.introduce(replica, self.ledger.new_first_attempt())
        self.requests.resubmit_all(replica)

    def on_heartbeat(self) -> None:
        """Drop peers that are silent, and clients that have disconnected or do not read."""
        self.tokenizers.lose_silent()
        self.router.on_heartbeat()
        self.requests.migrate_stranded()
        self.connections.handle_events()
        self.requests.on_heartbeat()
        self.clients.on_heartbeat()
        self.status_queries.drop_closed()

    @property
    def is_ready(self) -> bool:
        return self.router.is_ready and len(self.tokenizers.peers) > 0

    def status(self, metrics: bool = False) -> StatusReply:
        return StatusReply(
            ready=self.is_ready,
            model=str(self.config.model_folder),
            num_requests=len(self.ledger),
            tokenizers={peer.name: len(peer.work) for peer in self.tokenizers.peers},
            schedulers=self.router.statuses,
            num_bad_frames=sum(channel.num_bad_frames for channel, _ in self.handlers),
            draining=self.requests.is_draining,
            processes=self.processes,
            metrics=self.metrics if metrics else None,
        )

    def counters(self) -> dict[str, float]:
        return {
            "open_requests": self.ledger.num_open,
            "open_questions": len(self.requests.queries),
            "connections": len(self.connections),
            "disconnected_clients_total": self.connections.num_cut_off,
        }
