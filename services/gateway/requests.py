"""The life of a request, from its validation to its release. `Requests` owns it.

A delta passes four objects between the socket of the detokenizers and the client's socket:
`Model.on_results` → `Requests.on_deltas` → `Entry.append` → `ClientSocket.deliver`.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from penstock.protocol.generation_config import read_generation_config
from penstock.protocol.messages.client import ErrorReply, GenerateReply, GenerateRequest, TextDelta
from penstock.protocol.messages.metrics import Metrics
from penstock.protocol.messages.tokenizer import RequestFailed
from penstock.protocol.poison import REFUSED
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.death_reports import DeathReports
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.process import Process
from penstock.services.gateway.client_socket import ClientSocket
from penstock.services.gateway.connections import Client
from penstock.services.gateway.entry import Entry, GapError, estimated_tokens
from penstock.services.gateway.ledger import Admission, Ledger
from penstock.services.gateway.router import Router
from penstock.services.gateway.tokenizer_queries import Queries, Query, num_query_tokens
from penstock.services.gateway.tokenizers import Tokenizers, Work
from penstock.services.gateway.validation import (
    GIVEN_UP,
    Poison,
    RefusedError,
    TokenizerRequest,
    Validation,
    WorkRequest,
    check_same,
    digest,
)

log = logging.getLogger("gateway")
DEFECT = "the gateway failed at this request; its log has the reason"


class Requests:
    """Accepts requests, resubmits them after failures, and ends them.

    A gateway that was restarted during a drain knows no request. Its clients send again what runs
    (by its id, under a lease of the scheduler), or what is to be continued: that is accepted.
    """

    def __init__(
        self,
        process: Process,
        ledger: Ledger,
        clients: ClientSocket,
        to_tokenizers: Channel[Any],
        router: Router,
        call_later: CallLater,
    ) -> None:
        config = process.config
        self._generation = read_generation_config(config.model_folder)
        self.validation = Validation(config)
        self._admission = Admission(config, ledger.totals)
        self.metrics = Metrics.empty(self.validation.max_model_len)
        self.tracer = Tracer(config, process.name)
        self.poison = Poison(DeathReports(process))
        self.tokenizers = Tokenizers(to_tokenizers, self.poison, self)
        send, forget = self.tokenizers.submit, self.tokenizers.forget
        self.queries = Queries(ledger.first_attempt, clients, ledger.totals, send, forget)
        self._ledger, self._clients, self._router = ledger, clients, router
        self._call_later = call_later
        self.is_draining = False

    def submit(self, client: Client, request: GenerateRequest, num_bytes: int) -> None:
        """Accept a request, or attach the client to the open one. Raises RefusedError."""
        self.poison.check(request)
        entry = self._ledger.find(request.request_id) if request.request_id else None
        if entry is None:
            self._accept(client, request, num_bytes)
        else:
            check_same(request, entry.request)
            self._adopt(entry, client)

    def submit_query(self, client: Client, query: TokenizerRequest, num_bytes: int) -> None:
        """Accept a request that a tokenizer answers alone. Raises RefusedError."""
        if client.connection.is_closed:
            return
        self.poison.check(query)
        self._check_drain(query)
        self._admission.check(num_bytes, num_query_tokens(query), client.share)
        self.validation.check_query(query)
        self.queries.submit(client, query, num_bytes)

    def abort(self, client: Client, request_id: str) -> bool:
        """End a request with the output that it has; False if it is not open.

        A request that is answered on another open connection is not open for this client.
        """
        entry = self._ledger.get(request_id)
        owner = entry and entry.client.connection
        if not entry or not owner or not (owner.is_closed or owner is client.connection):
            return False
        self._answer(entry, entry.reply("abort"))
        return True

    def _accept(self, client: Client, request: GenerateRequest, num_bytes: int) -> None:
        self._check_drain(request)
        self._admission.check(num_bytes, estimated_tokens(request), client.share)
        self.validation.check(request, is_req_socket=client.envelope[-1] == b"")
        entry = Entry(request, request.request_id or uuid4().hex, client, num_bytes)
        entry.accepted_at = time.monotonic()
        self._generation.fill(entry.sampling)
        self._ledger.open(entry)
        self._router.assign(entry)
        self._clients.connections.attach(entry.request_id, client)
        if request.timeout is not None:
            entry.timer = self._call_later(
                request.timeout, lambda: self._answer(entry, entry.reply("abort"))
            )
        self.tokenizers.submit(entry)

    def _adopt(self, entry: Entry, client: Client) -> None:
        """Deliver an answer, from its start, to the client that asked for it last."""
        request_id, previous = entry.request_id, entry.client
        self._clients.connections.detach(request_id, previous)
        if previous.connection is not client.connection:
            message = f"request {request_id!r} is answered on another connection now"
            error = ErrorReply(code="failed", message=message, request_id=request_id)
            self._clients.reply(previous, error)
        entry.client = client
        entry.rewind()
        self._clients.connections.attach(request_id, client)
        self._clients.deliver(entry)

    def _check_drain(self, request: WorkRequest) -> None:
        if not self.is_draining:
            return
        if isinstance(request, GenerateRequest):
            known = request.request_id and self._router.may_have(request.request_id)
            if known or request.output_token_ids:
                return
        raise RefusedError("the pipeline is stopping and accepts no requests", code="overloaded")

    def on_deltas(self, deltas: list[TextDelta], now: float) -> None:
        """Deliver new output, at `now` of time.monotonic; a request that raises fails alone."""
        for delta in deltas:
            entry = self._ledger.get(delta.request_id)
            if entry is None:
                self._router.release_everywhere(delta.request_id, delta.attempt)
                continue
            try:
                self._on_delta(entry, delta, now)
            except Exception:  # noqa: BLE001
                self.on_defect(entry)

    def _on_delta(self, entry: Entry, delta: TextDelta, now: float) -> None:
        if entry.left:
            self._router.release_left(entry, delta.attempt)
        num_tokens, num_bytes = len(entry.token_ids), entry.num_bytes
        try:
            is_new = entry.append(delta)
        except GapError as error:
            log.warning(
                "%s: %s; resubmitting it",
                entry.request_id,
                error,
                extra={"request_id": entry.request_id},
            )
            self._ledger.begin_attempt(entry)
            self.tokenizers.submit(entry)
            return
        self._ledger.take_growth(entry, num_bytes)
        num_new = len(entry.token_ids) - num_tokens
        if num_new or delta.pooled:
            entry.record_tokens(self.metrics, num_new, now)
        if is_new and delta.finish_reason:
            self._answer(entry, entry.reply(delta.finish_reason))
        elif is_new and entry.request.stream:
            self._clients.deliver(entry)

    def on_failed(self, message: RequestFailed) -> None:
        """Fail a request that can't be served; if it is poison, equal ones are refused."""
        entry = self._ledger.get(message.request_id)
        if entry and entry.attempt == message.attempt:
            self.fail(entry, message.error)
            if message.is_poison:
                self._fail_likes(entry.request)

    def on_poison(self, work: Work) -> None:
        if isinstance(work, Query):
            self.queries.fail(work, GIVEN_UP)
        elif work.is_open:
            self.fail(work, ErrorReply(code="failed", message=GIVEN_UP))
        self._fail_likes(work.request)

    def on_tokenized(self, request_id: str, attempt: int, num_tokens: int, by: bytes) -> None:
        """Record that a tokenizer has passed a prompt of `num_tokens` on."""
        if entry := self._ledger.get(request_id):
            self._router.release_left(entry, attempt)
            self._ledger.take_prompt_length(entry, num_tokens)
            entry.tokenizer = by
        else:  # ended meanwhile
            self._router.release_everywhere(request_id, attempt)

    def resubmit_all(self, replica: int) -> None:
        """Resubmit the requests of a scheduler: it, or this gateway, has restarted."""
        if entries := self._router.entries_of(replica):
            name = replica + 1
            log.warning("resubmitting %d requests that scheduler.%d may lack", len(entries), name)
        self._for_each(entries, self._resubmit)

    def resubmit_passed_on_by(self, tokenizer: bytes) -> None:
        """Resubmit what a tokenizer has passed on: it may have been lost with it."""
        self._for_each(self._ledger.passed_on_by(tokenizer), self._resubmit)

    def migrate_stranded(self) -> None:
        """Migrate what a replica can't run to another one."""
        if entries := self._router.stranded():
            log.warning("a replica is down; migrating %d requests to others", len(entries))
        self._for_each(entries, self._resubmit)

    def _resubmit(self, entry: Entry) -> None:
        """Submit a request once more, to be resumed after the tokens that it has."""
        attempt = entry.attempt
        left = self._router.migrate(entry)
        self._ledger.begin_attempt(entry)
        if left is not None:
            entry.left[attempt] = left
            self._router.release_left(entry, attempt)
        self.tokenizers.submit(entry)

    def _for_each(self, entries: Iterable[Entry], handle: Callable[[Entry], None]) -> None:
        """Call `handle` with each entry; an entry at which it raises fails, alone."""
        for entry in entries:
            try:
                handle(entry)
            except Exception:  # noqa: BLE001
                self.on_defect(entry)

    def on_defect(self, entry: Work) -> None:
        """Fail work that raises, in an `except` block: other requests continue."""
        if isinstance(entry, Query):
            log.exception("a query raised and is failed")
            return self.queries.fail(entry, DEFECT)
        request_id, extra = entry.request_id, {"request_id": entry.request_id}
        log.exception("request %s raised and is failed", request_id, extra=extra)
        try:
            self.fail(entry, ErrorReply(code="failed", message=DEFECT))
        except Exception:
            log.exception("request %s is dropped", request_id, extra=extra)
            self._clients.release(entry)

    def on_heartbeat(self) -> None:
        self._admission.sample(time.monotonic())
        self.queries.drop_closed()

    def fail(self, entry: Entry, error: ErrorReply) -> None:
        error.request_id = entry.request_id
        self._answer(entry, error)

    def _fail_likes(self, request: WorkRequest) -> None:
        """Refuse a poison request, and fail those that are open and have no output."""
        poison = self.poison.give_up(request)
        for entry in self._router.entries:
            if not entry.token_ids and digest(entry.request) == poison:
                self.fail(entry, ErrorReply(code="failed", message=REFUSED))

    def _answer(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        self._end(entry, reply)
        self._ledger.answer(entry, reply)
        self._clients.deliver(entry)

    def drop(self, entries: Iterable[Entry]) -> None:
        """End requests, answered or not, whose client can't get the answer."""
        self._for_each(entries, self._drop)

    def _drop(self, entry: Entry) -> None:
        if entry.answer is None:
            self._end(entry, entry.reply("abort"))
        self._clients.release(entry)

    def _end(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        entry.record_end(self.metrics, reply, time.monotonic())
        if self.tracer.is_on:
            entry.write_span(self.tracer, reply)
        if entry.timer:
            entry.timer.cancel()
        self.tokenizers.forget(entry)
        self._router.unassign(entry)
        self._router.release(entry.replica, entry.request_id, entry.attempt)
