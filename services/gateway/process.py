"""The gateway process: the event loop over client, tokenizer and result sockets, and the status."""

import logging
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from penstock.protocol.messages.client import (
    AbortReply,
    AbortRequest,
    Codec,
    DetokenizeRequest,
    GenerateRequest,
    StatusRequest,
    TokenizePromptRequest,
)
from penstock.protocol.messages.client import Request as ClientRequest
from penstock.protocol.messages.pipeline import (
    Goodbye,
    Heartbeat,
    Refused,
    RequestFailed,
    TextDeltas,
    TokenizeDone,
    TokenizerReply,
)
from penstock.protocol.messages.pipeline import refusal as refusal_of_version
from penstock.protocol.messages.status import (
    ModelStatus,
    ProcessStatus,
    SchedulerStatus,
    StatusReply,
)
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.context import Handlers
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.process import Process, first_number
from penstock.services.gateway.admission import RefusedError, refusal
from penstock.services.gateway.clients import ClientSocket
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.request import Client, Connection, Request
from penstock.services.gateway.requests import Requests

log = logging.getLogger("gateway")
UNREAD = "it does not read its answers (--max-unread-bytes)"
# Wait at the end of a drain. Clients with ZMQ_IMMEDIATE, such as ours, discard unread replies when
# the connection is closed.
CLOSE_GRACE_SECONDS = 1.0
# Longest time for which the gateway merges waiting output before it delivers the output.
MAX_MERGE_SECONDS = 0.01
# Limit on waiting status requests: one report answers all of them, in a few milliseconds.
MAX_WAITING = 1024
MAX_WAITING_PER_CONNECTION = 64


class Gateway:
    """The event handlers of the gateway, which connect clients with the models."""

    def __init__(self, process: Process, call_later: CallLater) -> None:
        self.has_drained = False
        self.call_later = call_later
        self.ledger = Ledger(first_number(process.incarnation))
        self.clients = ClientSocket(process, self.ledger, self.on_defect)
        self.connections = self.clients.connections
        self.models = [
            Requests(part, self.ledger, self.clients, call_later) for part in process.by_model()
        ]
        self.default = self.models[0]
        self._by_name = {name: model for model in self.models for name in model.config.model_names}
        longest = max(self.models, key=lambda model: model.validation.max_model_len)
        self._decode = longest.validation.decode
        self.handlers: Handlers = [
            *((model.results, partial(self.on_results, model)) for model in self.models),
            *((model.to_tokenizers, partial(self.on_tokenizers, model)) for model in self.models),
            (self.clients.channel, self.on_clients),
            (self.connections.monitor, self.connections.handle_events),
            *process.context.handlers,
        ]
        self.status = PipelineStatus(self.clients, self.models, self.handlers)

    # ---- a turn of the event loop: receive, decide, send ---------------------------------------

    def on_clients(self) -> None:
        """Handle clients' messages. A refused message leads to an error reply to its sender."""
        for client, frame in self.clients.receive():
            model = self.default
            try:
                message = self._decode(client.codec, frame)
                client = self._named_client(client, message)
                model = self.model_of(message)
                self.on_request(model, client, message, len(frame))
            except RefusedError as error:
                error.reply.request_id = client.codec.request_id(frame)
                model.metrics.count_failure(error.reply.code)
                model.log_refusal(client, error.reply)
                self.clients.reply(client, error.reply)

    def on_tokenizers(self, model: Requests) -> None:
        for identity, message in model.to_tokenizers.receive():
            match message:
                case Heartbeat():
                    if reason := refusal_of_version(message.name, message.version):
                        model.to_tokenizers.send(Refused(reason), identity)
                    else:
                        model.tokenizers.alive(identity, message.name)
                case Goodbye():
                    model.tokenizers.lose(identity, has_died=False)
                case TokenizeDone(request_id, attempt, num_tokens):
                    model.tokenizers.done(identity, (request_id, attempt))
                    model.on_tokenized(request_id, attempt, num_tokens, identity)
                case RequestFailed():
                    model.tokenizers.done(identity, (message.request_id, message.attempt))
                    model.on_failed(message)
                case TokenizerReply():
                    model.tokenizers.done(identity, message.number)
                    model.on_query_reply(message)

    def on_results(self, model: Requests) -> None:
        for _, message in model.results.receive(MAX_MERGE_SECONDS):
            match message:
                case TextDeltas(deltas):
                    model.on_deltas(deltas, time.monotonic())
                case RequestFailed():
                    model.on_failed(message)
                case SchedulerStatus():
                    if model.on_scheduler(message):
                        self.status.on_report(model, message.replica)
                case SupervisorReport():
                    self.on_report(message)
        self.clients.deliver_pending()

    def after_turn(self) -> None:
        """Deliver pending output. End the process when it has drained."""
        self.clients.deliver_pending()
        if self.status.for_ready:
            self.status.answer_ready()
        if self.default.is_draining and not self.has_drained:
            self._end_if_drained()

    # ---- the clients' requests -----------------------------------------------------------------

    def on_request(
        self, model: Requests, client: Client, message: ClientRequest, num_bytes: int
    ) -> None:
        match message:
            case GenerateRequest():
                model.submit(client, message, num_bytes)
            case TokenizePromptRequest() | DetokenizeRequest():
                model.submit_query(client, message, num_bytes)
            case AbortRequest():
                found = model.abort(client, message.request_id)
                self.clients.deliver_pending()  # the final output of the aborted request
                self.clients.reply(client, AbortReply(request_id=message.request_id, found=found))
            case StatusRequest():
                self.status.submit(client, message)

    def model_of(self, message: ClientRequest) -> Requests:
        """Return the model that a message is for. Raises RefusedError for an unknown name.

        An abort is for the model of the aborted request. So that equal requests compare equal, an
        alias in `message.model` becomes the model's first name, and the default model's name None.
        """
        if isinstance(message, AbortRequest):
            request = self.ledger.get(message.request_id)
            return self._by_name[request.totals.name] if request else self.default
        model = self.default if message.model is None else self._by_name.get(message.model)
        if model is None:
            names = ", ".join(map(repr, self._by_name))
            raise refusal("model", f"got {message.model!r}, expected {names}")
        keeps_name = model is not self.default or isinstance(message, StatusRequest)
        message.model = model.name if message.model and keeps_name else None
        return model

    def _named_client(self, client: Client, message: ClientRequest) -> Client:
        """Return the client that an HTTP server names. Raises RefusedError for other senders."""
        name = getattr(message, "client", None)
        if name is None:
            return client
        if not client.connection.is_inner:
            raise refusal("client", f"got {name!r}, expected none: only HTTP servers name clients")
        return client._replace(share=self.connections.share(name), turn=name)

    # ---- reports, heartbeats, the end ----------------------------------------------------------

    def on_report(self, report: SupervisorReport) -> None:
        """Record a report of the supervisor: processes, draining and poison requests."""
        is_first = not self.status.processes  # also after a restart of the gateway
        self.status.processes = report.processes
        for model in self.models:
            model.is_draining |= report.draining
            if is_first:
                model.poison.learn(report.poison)
            model.on_processes([process.name for process in report.processes])

    def on_heartbeat(self) -> None:
        """Drop silent peers, and clients that have disconnected or do not read their answers."""
        for model in self.models:
            model.on_heartbeat()
        self.connections.handle_events()
        self._drop(self.ledger.take_lost())
        for connection in self.clients.retry_full():
            requests = self.ledger.of_connection(connection)
            log.warning(
                "a client has left %d bytes of answers unread: its %d requests are aborted",
                self.clients.num_unread_bytes(connection),
                len(requests),
            )
            self._drop(requests)
            self.connections.cut_off(connection, UNREAD)
        self.clients.cut_off_bad_clients()
        self.status.drop_closed()

    def on_defect(self, request: Request) -> None:
        self._by_name[request.totals.name].on_defect(request)

    def _drop(self, requests: list[Request]) -> None:
        for model in self.models:
            model.drop([request for request in requests if request.totals is model.totals])

    def _end_if_drained(self) -> None:
        if self.ledger or any(model.queries or model.router.awaits_claims for model in self.models):
            return
        folders = [model for model in self.models if model.config.kv_offload_folder]
        if not all(model.router.has_saved() for model in folders):
            return
        self.has_drained = True
        end = partial(signal.raise_signal, signal.SIGTERM)
        if len(self.connections):
            self.call_later(CLOSE_GRACE_SECONDS, end)
        else:
            end()


class _StatusQuery(NamedTuple):
    """A waiting status request, with the replicas that have reported since its arrival."""

    client: Client
    message: StatusRequest
    reported: set[tuple[Requests, int]]


class PipelineStatus:
    """The status of all models, and the status requests that wait for readiness or a fresh report.

    The total number of waiting requests is limited, except for our HTTP servers, whose clients ask
    for `/health`.
    """

    def __init__(
        self, clients: ClientSocket, models: Sequence[Requests], handlers: Handlers
    ) -> None:
        self.processes: list[ProcessStatus] = []  # from the supervisor's newest report
        # requests that wait for a model to be ready; key None: for all models
        self.for_ready: dict[str | None, list[_StatusQuery]] = {}
        self.for_report: list[_StatusQuery] = []
        self._clients, self._ledger = clients, clients.ledger
        self._models, self._handlers = models, handlers

    def submit(self, client: Client, message: StatusRequest) -> None:
        """Answer a status request, or queue it. Raises RefusedError if too many requests wait."""
        query = _StatusQuery(client, message, set())
        must_wait = message.wait and not self.is_ready(message.model)
        if not (must_wait or message.fresh):
            self._answer([query])
            return
        self._check_room(client.connection)
        client.connection.num_status_queries += 1
        waiting = self.for_report
        if must_wait:
            waiting = self.for_ready.setdefault(message.model, [])
        waiting.append(query)

    def answer_ready(self) -> None:
        """Answer the requests whose models are ready."""
        for name in list(filter(self.is_ready, self.for_ready)):
            self._answer(self.for_ready.pop(name), waited=True)

    def on_report(self, model: Requests, replica: int) -> None:
        """Record a replica's report. Answer requests that wait for no other live replica."""
        waiting, self.for_report = self.for_report, []
        complete: list[_StatusQuery] = []
        for query in waiting:
            query.reported.add((model, replica))
            (complete if self._covers_all(query.reported) else self.for_report).append(query)
        self._answer(complete, waited=True)

    def drop_closed(self) -> None:
        """Remove the requests of clients that have disconnected."""
        self.for_report = _open(self.for_report)
        waiting = {name: _open(queries) for name, queries in self.for_ready.items()}
        self.for_ready = {name: queries for name, queries in waiting.items() if queries}

    def is_ready(self, name: str | None = None) -> bool:
        """Return whether a model is ready. Without a name, return whether all models are ready."""
        return all(model.is_ready for model in self._models if name in (None, model.name))

    def reply(self, metrics: bool = False) -> StatusReply:
        models = [self._model_status(model, metrics) for model in self._models]
        return StatusReply(
            name=models[0].name,
            model=models[0].model,
            ready=self.is_ready(),
            tokenizers={name: work for model in models for name, work in model.tokenizers.items()},
            schedulers=[status for model in models for status in model.schedulers],
            models=models if len(models) > 1 else [],
            num_requests=len(self._ledger),
            num_bad_frames=sum(channel.num_bad_frames for channel, _ in self._handlers),
            draining=self._models[0].is_draining,
            processes=self.processes,
            metrics=None if models[1:] else models[0].metrics,
        )

    def counters(self) -> dict[str, float]:
        connections = self._clients.connections
        return {
            "open_requests": self._ledger.num_open,
            "open_queries": sum(len(model.queries) for model in self._models),
            "connections": len(connections),
            "disconnected_clients_total": connections.num_cut_off,
        }

    def _model_status(self, model: Requests, metrics: bool) -> ModelStatus:
        return ModelStatus(
            name=model.name,
            model=str(model.config.model_folder),
            ready=model.is_ready,
            tokenizers={peer.name: len(peer.work) for peer in model.tokenizers.peers},
            schedulers=model.router.statuses,
            num_requests=self._ledger.num_of_model(model.totals),
            metrics=model.metrics if metrics else None,
        )

    def _covers_all(self, reported: set[tuple[Requests, int]]) -> bool:
        return all(
            model.router.covers_all({replica for other, replica in reported if other is model})
            for model in self._models
        )

    def _check_room(self, connection: Connection) -> None:
        num_own = connection.num_status_queries
        number = len(self.for_report) + sum(map(len, self.for_ready.values()))
        if num_own >= MAX_WAITING_PER_CONNECTION:
            waiting = f"{num_own} status requests wait on this connection"
        elif number >= MAX_WAITING and not connection.is_inner:
            waiting = f"{number} status requests wait"
        else:
            return
        text = f"overloaded: {waiting}, which is the limit"
        raise RefusedError(text, code="overloaded", retry_after=1.0)

    def _answer(self, queries: list[_StatusQuery], waited: bool = False) -> None:
        frames: dict[tuple[Codec, bool], bytes] = {}
        for client, message, _ in queries:
            client.connection.num_status_queries -= waited
            kind = client.codec, message.metrics
            if kind not in frames:
                frames[kind] = client.codec.encode(self.reply(message.metrics))
            self._clients.send(client, frames[kind])


def _open(queries: list[_StatusQuery]) -> list[_StatusQuery]:
    return [query for query in queries if not query.client.connection.is_closed]
