"""Queries: requests that a tokenizer answers alone, and requests for the status."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from penstock.protocol.messages.client import StatusRequest, TokenizePromptRequest
from penstock.protocol.messages.codec import Codec
from penstock.protocol.messages.status import StatusReply
from penstock.protocol.messages.tokenizer import TokenizerQuery, TokenizerReply
from penstock.services.gateway.client_socket import ClientSocket
from penstock.services.gateway.connections import Client, Totals
from penstock.services.gateway.entry import Entry, estimated_tokens
from penstock.services.gateway.validation import RefusedError, TokenizerRequest


class Query:
    """One request that a tokenizer answers alone: token ids of a prompt, or text of token ids."""

    def __init__(
        self, number: int, client: Client, request: TokenizerRequest, num_bytes: int
    ) -> None:
        self.key = number
        self.client = client
        self.size = num_bytes
        self.share = client.share
        self.priority = 0
        self.num_tokens = num_query_tokens(request)
        self.request = request

    @property
    def is_open(self) -> bool:
        return not self.client.connection.is_closed

    def submission(self) -> TokenizerQuery:
        return TokenizerQuery(self.key, self.request)


Work = Entry | Query
"""of a tokenizer"""


def num_query_tokens(request: TokenizerRequest) -> int:
    """Return the estimated length of the prompt that is to be tokenized."""
    return estimated_tokens(request) if isinstance(request, TokenizePromptRequest) else 0


class Queries:
    """All open queries by number, which is unique: an earlier gateway's answer may arrive."""

    def __init__(self, first_number: int, clients: ClientSocket, totals: Totals) -> None:
        self._numbers = count(first_number)
        self._open: dict[int, Query] = {}
        self._clients = clients
        self._totals = totals

    def __len__(self) -> int:
        return len(self._open)

    def open(self, client: Client, request: TokenizerRequest, num_bytes: int) -> Query:
        """Return a new query, of a frame of `num_bytes`."""
        query = Query(next(self._numbers), client, request, num_bytes)
        self._open[query.key] = query
        self._totals.count(query.share, 1, query.num_tokens, query.size)
        return query

    def answer(self, message: TokenizerReply) -> None:
        """Send a tokenizer's reply to the client; the second one of a query is dropped."""
        if query := self._remove(message.number):
            self._clients.reply(query.client, message.reply)

    def take_closed(self) -> Iterator[Query]:
        """Remove and yield queries whose client has disconnected."""
        for query in [one for one in self._open.values() if not one.is_open]:
            self._remove(query.key)
            yield query

    def _remove(self, number: int) -> Query | None:
        query = self._open.pop(number, None)
        if query:
            self._totals.count(query.share, -1, -query.num_tokens, -query.size)
        return query


MAX_WAITING = 1024
"""status requests that are answered at once, when a report arrives: in a few milliseconds"""
MAX_WAITING_PER_CONNECTION = 64
ReplicaName = tuple[str, int]
"""name of a model, and a replica of it"""


class StatusQuery(NamedTuple):
    """One status request that waits, and the replicas that have reported since."""

    client: Client
    request: StatusRequest
    replicas: set[ReplicaName]


class StatusQueries:
    """Status requests that wait for readiness, or for a fresh report.

    Their number is limited, in all except for our HTTP servers, whose clients ask for `/health`.
    """

    def __init__(self, clients: ClientSocket, status: Callable[[bool], StatusReply]) -> None:
        self.for_ready: list[StatusQuery] = []
        self.for_report: list[StatusQuery] = []
        self._clients = clients
        self._status = status

    def submit(self, client: Client, request: StatusRequest, is_ready: bool) -> None:
        """Answer a status request now, or later. Raises RefusedError where too many wait."""
        query = StatusQuery(client, request, set())
        if request.wait and not is_ready:
            self._wait(query, self.for_ready)
        elif request.fresh:
            self._wait(query, self.for_report)
        else:
            self._answer([query])

    def on_ready(self, is_ready: Callable[[StatusRequest], bool]) -> None:
        """Answer the requests for which `is_ready` is true."""
        waiting, self.for_ready = self.for_ready, []
        ready: list[StatusQuery] = []
        for query in waiting:
            (ready if is_ready(query.request) else self.for_ready).append(query)
        self._answer(ready, waited=True)

    def on_report(
        self, replica: tuple[str, int], covers_all: Callable[[set[tuple[str, int]]], bool]
    ) -> None:
        """Answer the requests for which every replica that is not silent has reported."""
        waiting, self.for_report = self.for_report, []
        complete: list[StatusQuery] = []
        for query in waiting:
            query.replicas.add(replica)
            (complete if covers_all(query.replicas) else self.for_report).append(query)
        self._answer(complete, waited=True)

    def drop_closed(self) -> None:
        self.for_ready = [one for one in self.for_ready if not one.client.connection.is_closed]
        self.for_report = [one for one in self.for_report if not one.client.connection.is_closed]

    def _wait(self, query: StatusQuery, waiting: list[StatusQuery]) -> None:
        connection = query.client.connection
        num_own, number = connection.num_status_queries, len(self.for_ready) + len(self.for_report)
        is_full = number >= MAX_WAITING and not connection.is_inner
        if num_own >= MAX_WAITING_PER_CONNECTION or is_full:
            where = " on this connection" * (num_own >= MAX_WAITING_PER_CONNECTION)
            text = f"overloaded: {num_own if where else number} status requests wait{where}"
            raise RefusedError(f"{text}, which is the limit", code="overloaded", retry_after=1.0)
        connection.num_status_queries += 1
        waiting.append(query)

    def _answer(self, queries: list[StatusQuery], waited: bool = False) -> None:
        frames: dict[tuple[Codec, bool], bytes] = {}
        for client, request, _ in queries:
            client.connection.num_status_queries -= waited
            kind = client.codec, request.metrics
            if kind not in frames:
                frames[kind] = client.codec.encode(self._status(request.metrics))
            self._clients.send(client, frames[kind])
