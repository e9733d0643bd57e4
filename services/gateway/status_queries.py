"""Status requests that wait: for the pipeline to be ready, or for a fresh report."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.protocol.messages.client import Codec, StatusRequest
from penstock.protocol.messages.status import StatusReply
from penstock.services.gateway.connections import Client
from penstock.services.gateway.delivery import Outbox
from penstock.services.gateway.validation import RefusedError

MAX_WAITING = 1024
"""that are answered at once, when a report comes: in a few milliseconds"""
MAX_PER_CONNECTION = 64


class Query(NamedTuple):
    """One status request, and the replicas that have reported since."""

    client: Client
    request: StatusRequest
    replicas: set[int]


class StatusQueries:
    """Answers status requests, now or later. How many wait is limited, in total and for each
    connection."""

    def __init__(self, outbox: Outbox, status: Callable[[bool], StatusReply]) -> None:
        """status: makes a reply, with metrics or without."""
        self.for_ready: list[Query] = []
        self.for_report: list[Query] = []
        self._outbox = outbox
        self._status = status

    def ask(self, client: Client, request: StatusRequest, is_ready: bool) -> None:
        """A client asks. Raises RefusedError where too many wait."""
        query = Query(client, request, set())
        if request.wait and (request.fresh or not is_ready):
            self._wait(query, self.for_ready)
        elif request.fresh:
            self._wait(query, self.for_report)
        else:
            self._answer([query])

    def on_ready(self) -> None:
        """The pipeline has become ready."""
        waiting, self.for_ready = self.for_ready, []
        self._answer(self._leave(waiting))

    def on_report(self, replica: int, are_all: Callable[[set[int]], bool]) -> None:
        """A scheduler has reported; `are_all`: nothing is to be waited for besides these."""
        for query in self.for_report:
            query.replicas.add(replica)
        complete = [query for query in self.for_report if are_all(query.replicas)]
        self.for_report = [query for query in self.for_report if not are_all(query.replicas)]
        self._answer(self._leave(complete))

    def on_heartbeat(self) -> None:
        """Drops the queries of clients that have disconnected."""
        self.for_ready = [one for one in self.for_ready if not one.client.connection.is_gone]
        self.for_report = [one for one in self.for_report if not one.client.connection.is_gone]

    def _wait(self, query: Query, waiting: list[Query]) -> None:
        connection = query.client.connection
        if (number := connection.num_status_queries) >= MAX_PER_CONNECTION:
            limit = f"{number} status requests wait on this connection, which is the limit"
        elif (number := len(self.for_ready) + len(self.for_report)) >= MAX_WAITING:
            limit = f"{number} status requests wait, which is the limit"
        else:
            connection.num_status_queries += 1
            waiting.append(query)
            return
        raise RefusedError(f"overloaded: {limit}", code="overloaded", retry_after=1.0)

    def _leave(self, queries: list[Query]) -> list[Query]:
        for query in queries:
            query.client.connection.num_status_queries -= 1
        return queries

    def _answer(self, queries: Iterable[Query]) -> None:
        """One reply of each kind is made and encoded for all of them."""
        frames: dict[tuple[Codec, bool], bytes] = {}
        for client, request, _ in queries:
            kind = client.codec, request.metrics
            if kind not in frames:
                frames[kind] = client.codec.encode(self._status(request.metrics))
            self._outbox.send(client, frames[kind])
