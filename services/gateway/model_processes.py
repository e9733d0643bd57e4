"""One model: the sockets of its processes, and the handler of each of their messages."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from penstock.protocol.config import replica_of
from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.pipeline import (
    FromTokenizer,
    Goodbye,
    Heartbeat,
    Refused,
    RequestFailed,
    TextDeltas,
    ToGateway,
    TokenizeDone,
    TokenizerReply,
    refusal,
)
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import Handlers
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.process import Process
from penstock.services.gateway.clients.client_socket import ClientSocket
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.requests.lifecycle import Requests
from penstock.services.gateway.requests.router import Router

# for which output that has arrived is collected before it is delivered, where more of it waits
MAX_MERGE_SECONDS = 0.01


class ModelProcesses:
    """A model's tokenizers, schedulers and detokenizers, and its requests."""

    def __init__(
        self,
        process: Process,
        ledger: Ledger,
        clients: ClientSocket,
        call_later: CallLater,
        on_report: Callable[[SupervisorReport], None],
        on_status: Callable[["ModelProcesses", SchedulerStatus], None],
    ) -> None:
        """on_status: takes each new status of a scheduler, after this object."""
        self.config = config = process.config
        self.name = config.model_name
        self.on_report, self.on_status = on_report, on_status
        self._ledger, self._clients = ledger, clients
        context, at = process.context, process.endpoints
        self.to_tokenizers = context.bind(zmq.ROUTER, at.tokenizers, FromTokenizer)
        self.results = context.bind(zmq.PULL, at.results, ToGateway)
        to_schedulers: list[Channel[Any]] = [
            context.connect(
                zmq.PUSH, one.requests, on_reconnect=partial(self.on_scheduler_reconnect, replica)
            )
            for replica, one in enumerate(process.all_endpoints)
        ]
        self.router = Router(to_schedulers, config.routing, ledger.first_attempt)
        self.requests = Requests(
            process, ledger, clients, self.to_tokenizers, self.router, call_later
        )
        self.tokenizers, self.metrics = self.requests.tokenizers, self.requests.metrics
        self.totals = self.requests.totals
        for replica in range(config.dp):
            self.router.announce_gateway(replica, ledger.first_attempt)
        self.handlers: Handlers = [
            (self.results, self.on_results),
            (self.to_tokenizers, self.on_tokenizers),
        ]

    def on_tokenizers(self) -> None:
        for identity, message in self.to_tokenizers.receive():
            match message:
                case Heartbeat():
                    if reason := refusal(message.name, message.version):
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
                    self.requests.failures.on_failed(message)
                case TokenizerReply():
                    self.tokenizers.done(identity, message.number)
                    self.requests.queries.answer(message)
                    if isinstance(message.reply, ErrorReply):
                        self.metrics.count_failure(message.reply.code)

    def on_results(self) -> None:
        for _, message in self.results.receive(MAX_MERGE_SECONDS):
            match message:
                case TextDeltas(deltas):
                    self.requests.on_deltas(deltas, time.monotonic())
                case RequestFailed():
                    self.requests.failures.on_failed(message)
                case SchedulerStatus():
                    self.on_scheduler(message)
                case SupervisorReport():
                    self.on_report(message)
        self._clients.deliver_pending()

    def on_scheduler(self, status: SchedulerStatus) -> None:
        """Resubmit the requests of a scheduler of a new epoch; the first epoch is new, too."""
        has_restarted = self.router.record_status(status)
        if has_restarted is None:
            return
        if has_restarted:
            self.requests.failures.resubmit_all(status.replica)
        self.requests.failures.migrate_stranded()
        self.on_status(self, status)

    def on_scheduler_reconnect(self, replica: int) -> None:
        """Resubmit all requests of a scheduler that reconnected; it forgets all others."""
        self.router.announce_gateway(replica, self._ledger.new_first_attempt())
        self.requests.failures.resubmit_all(replica)

    def on_processes(self, names: list[str]) -> None:
        """Record which processes run; migrate the requests of a scheduler that does not run."""
        schedulers = [one for one in names if one.startswith(f"{self.config.prefix}scheduler.")]
        self.router.record_running({replica_of(name, self.config) for name in schedulers})
        self.requests.failures.migrate_stranded()

    def on_heartbeat(self) -> None:
        """Drop processes that are silent."""
        self.tokenizers.lose_silent()
        self.router.on_heartbeat()
        self.requests.failures.migrate_stranded()
        self.requests.on_heartbeat()

    @property
    def is_ready(self) -> bool:
        return self.router.is_ready and len(self.tokenizers.peers) > 0
