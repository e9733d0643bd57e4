"""The status of the pipeline, and the status requests that wait for readiness or a report."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.protocol.messages.client import Codec, StatusRequest
from penstock.protocol.messages.status import ModelStatus, ProcessStatus, StatusReply
from penstock.protocol.transport.context import Handlers
from penstock.services.gateway.admission import RefusedError
from penstock.services.gateway.clients import ClientSocket
from penstock.services.gateway.request import Client, Connection
from penstock.services.gateway.requests import Requests

# Limit on waiting status requests: one report answers all of them, in a few milliseconds.
MAX_WAITING = 1024
MAX_WAITING_PER_CONNECTION = 64


class StatusQuery(NamedTuple):
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
        self.for_ready: dict[str | None, list[StatusQuery]] = {}
        self.for_report: list[StatusQuery] = []
        self._clients, self._ledger = clients, clients.ledger
        self._models, self._handlers = models, handlers

    def submit(self, client: Client, message: StatusRequest) -> None:
        """Answer a status request, or queue it. Raises RefusedError if too many requests wait."""
        query = StatusQuery(client, message, set())
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
        complete: list[StatusQuery] = []
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

    def _answer(self, queries: list[StatusQuery], waited: bool = False) -> None:
        frames: dict[tuple[Codec, bool], bytes] = {}
        for client, message, _ in queries:
            client.connection.num_status_queries -= waited
            kind = client.codec, message.metrics
            if kind not in frames:
                frames[kind] = client.codec.encode(self.reply(message.metrics))
            self._clients.send(client, frames[kind])


def _open(queries: list[StatusQuery]) -> list[StatusQuery]:
    return [query for query in queries if not query.client.connection.is_closed]
