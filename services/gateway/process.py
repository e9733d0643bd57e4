"""The gateway's process: the clients' socket, and the models that serve its requests."""

import logging
import signal
from functools import partial

from penstock.protocol.messages.client import (
    AbortReply,
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    Request,
    StatusRequest,
    TokenizePromptRequest,
)
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.context import Handlers
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.process import Process, first_number
from penstock.services.gateway.client import Client
from penstock.services.gateway.clients.client_socket import ClientSocket
from penstock.services.gateway.entry import Entry
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.model_processes import ModelProcesses
from penstock.services.gateway.status import PipelineStatus
from penstock.services.gateway.validation import RefusedError

log = logging.getLogger("gateway")
UNREAD = "it does not read its answers (--max-unread-bytes)"
# seconds at the end of a drain: a client with ZMQ_IMMEDIATE, as ours, discards unread replies when
# its connection is closed
CLOSE_GRACE_SECONDS = 1.0


class Gateway:
    """Connects clients with the models."""

    def __init__(self, process: Process, call_later: CallLater) -> None:
        self.has_drained = False
        self.call_later = call_later
        self.ledger = Ledger(first_number(process.incarnation))
        self.clients = ClientSocket(process, self.ledger, self.on_defect)
        self.connections = self.clients.connections
        callbacks = call_later, self.on_report, self.on_status
        self.models = [
            ModelProcesses(part, self.ledger, self.clients, *callbacks)
            for part in process.by_model()
        ]
        self.default = self.models[0]
        self._by_name = {name: one for one in self.models for name in one.config.model_names}
        longest = max(self.models, key=lambda model: model.requests.validation.max_model_len)
        self._decode = longest.requests.validation.decode
        self.handlers: Handlers = [
            *(handler for model in self.models for handler in model.handlers),
            (self.clients.channel, self.on_clients),
            (self.connections.monitor, self.connections.handle_events),
            *process.context.handlers,
        ]
        self.status = PipelineStatus(self.clients, self.models, self.handlers)

    def after_turn(self) -> None:
        """Send what is left to be sent. End the process when it has drained."""
        self.clients.deliver_pending()
        if self.status.for_ready:
            self.status.answer_ready()
        if not self.default.requests.is_draining:
            return
        is_idle = not (self.ledger or any(model.requests.queries for model in self.models))
        must_wait = self.has_drained or any(model.router.awaits_claims for model in self.models)
        if is_idle and not must_wait:
            self.has_drained = True
            end = partial(signal.raise_signal, signal.SIGTERM)
            if len(self.connections):
                self.call_later(CLOSE_GRACE_SECONDS, end)
            else:
                end()

    def on_clients(self) -> None:
        """Handle requests; an error is reported to the sender alone."""
        for client, frame in self.clients.receive():
            model = self.default
            try:
                request = self._decode(client.codec, frame)
                if (name := getattr(request, "client", None)) is not None:
                    client = self.connections.named_client(client, name)
                model = self.model_of(request)
                self.on_request(model, client, request, len(frame))
            except RefusedError as error:
                model.metrics.count_failure(error.reply.code)
                error.reply.request_id = client.codec.request_id(frame)
                model.requests.failures.log_refusal(client, error.reply)
                self.clients.reply(client, error.reply)

    def model_of(self, request: Request) -> ModelProcesses:
        """Return the model that a request names, or whose request it aborts. Raises RefusedError.

        The name of the default is removed, another one becomes the model's first name.
        """
        if isinstance(request, AbortRequest):
            entry = self.ledger.get(request.request_id)
            return self._by_name[entry.totals.name] if entry else self.default
        model = self.default if request.model is None else self._by_name.get(request.model)
        if model is None:
            names = ", ".join(map(repr, self._by_name))
            raise RefusedError(f"model: got {request.model!r}, expected {names}", "model")
        keeps_name = model is not self.default or isinstance(request, StatusRequest)
        request.model = model.name if request.model and keeps_name else None  # so equals are equal
        return model

    def on_request(
        self, model: ModelProcesses, client: Client, request: Request, num_bytes: int
    ) -> None:
        match request:
            case GenerateRequest():
                model.requests.submit(client, request, num_bytes)
            case TokenizePromptRequest() | DetokenizeRequest():
                model.requests.submit_query(client, request, num_bytes)
            case AbortRequest():
                found = model.requests.abort(client, request.request_id)
                self.clients.deliver_pending()  # first the answer to the request that is aborted
                self.clients.reply(client, AbortReply(request_id=request.request_id, found=found))
            case StatusRequest():
                self.status.submit(client, request)

    def on_report(self, report: SupervisorReport) -> None:
        """Record which processes run."""
        is_first = not self.status.processes  # this gateway may have restarted
        self.status.processes = report.processes
        for model in self.models:
            model.requests.is_draining |= report.draining
            if is_first:
                model.requests.poison.learn(report.poison)
            model.on_processes([process.name for process in report.processes])

    def on_status(self, model: ModelProcesses, status: SchedulerStatus) -> None:
        self.status.on_report(model, status.replica)

    def on_heartbeat(self) -> None:
        """Drop peers that are silent, and clients that have disconnected or do not read."""
        for model in self.models:
            model.on_heartbeat()
        self.connections.handle_events()
        self._drop(self.ledger.take_lost())
        for connection in self.clients.retry_full():
            entries = self.ledger.of_connection(connection)
            log.warning(
                "a client has left %d bytes of answers unread: its %d requests are aborted",
                self.clients.num_unread_bytes(connection),
                len(entries),
            )
            self._drop(entries)
            self.connections.cut_off(connection, UNREAD)
        self.clients.cut_off_bad_clients()
        self.status.drop_closed()

    def on_defect(self, entry: Entry) -> None:
        self._by_name[entry.totals.name].requests.failures.on_defect(entry)

    def _drop(self, entries: list[Entry]) -> None:
        for model in self.models:
            model.requests.drop([entry for entry in entries if entry.totals is model.totals])
