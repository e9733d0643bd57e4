"""The life of a request, from its validation to its release. `Requests` owns it.

A delta passes four objects between the socket of the detokenizers and the client's socket:
`ModelProcesses.on_results` → `Requests.on_deltas` → `Entry.append` → `ClientSocket.deliver`.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from penstock.protocol.messages.client import ErrorReply, GenerateReply, GenerateRequest, TextDelta
from penstock.protocol.messages.status import Metrics
from penstock.protocol.tokenizer_file import read_generation_config
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import Process
from penstock.services.gateway.client import Client, Totals
from penstock.services.gateway.clients.client_socket import ClientSocket
from penstock.services.gateway.entry import Entry, GapError
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.requests.admission import Admission
from penstock.services.gateway.requests.failures import Failures, TokenizerPoison, log
from penstock.services.gateway.requests.queries import Queries, num_query_tokens
from penstock.services.gateway.requests.router import Router
from penstock.services.gateway.requests.tokenizers import Tokenizers
from penstock.services.gateway.validation import (
    RefusedError,
    TokenizerRequest,
    Validation,
    WorkRequest,
    check_same,
)


class Requests:
    """Accepts requests, takes their output, and ends them; `failures` resubmits them.

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
        self.totals = Totals(config.model_name)
        self._admission = Admission(config, self.totals)
        self.metrics = Metrics.empty(self.validation.max_model_len)
        self.tracer = Tracer(config, process.name)
        self.poison = TokenizerPoison(DeathReports(process))
        self.failures = Failures(ledger, router, self.poison, self)
        self.tokenizers = Tokenizers(to_tokenizers, self.poison, self.failures)
        self.queries = Queries(ledger.first_attempt, clients, self.totals)
        self._ledger, self.clients, self._router = ledger, clients, router
        self._call_later = call_later
        self.prefix = config.prefix
        self.is_draining = False

    def submit(self, client: Client, request: GenerateRequest, num_bytes: int) -> None:
        """Accept a request, or attach the client to the open one. Raises RefusedError."""
        if self.poison.known:
            self.poison.check(request)
        entry = self._ledger.find(request.request_id) if request.request_id else None
        if entry is None:
            self._accept(client, request, num_bytes)
        else:
            check_same(request, entry.request)
            self.clients.adopt(entry, client)

    def submit_query(self, client: Client, query: TokenizerRequest, num_bytes: int) -> None:
        """Accept a request that a tokenizer answers alone. Raises RefusedError."""
        if client.connection.is_closed:
            return
        if self.poison.known:
            self.poison.check(query)
        self._check_drain(query)
        self._admission.check(num_bytes, num_query_tokens(query), client.share)
        self.validation.check_query(query)
        self.tokenizers.submit(self.queries.open(client, query, num_bytes))

    def abort(self, client: Client, request_id: str) -> bool:
        """End a request with its output; False if it is not open, or another client's."""
        entry = self._ledger.get(request_id)
        owner = entry and entry.client.connection
        if not entry or not owner or not (owner.is_closed or owner is client.connection):
            return False
        self.answer(entry, entry.reply("abort"))
        return True

    def _accept(self, client: Client, request: GenerateRequest, num_bytes: int) -> None:
        self._check_drain(request)
        request_id = request.request_id or uuid4().hex
        entry = Entry(request, request_id, client, num_bytes, self._generation)
        self._admission.check(num_bytes, entry.num_waiting_tokens, client.share)
        self.validation.check(request, is_req_socket=client.envelope[-1] == b"")
        self._ledger.open(entry, self.totals)
        self._router.assign(entry)
        if request.timeout is not None:
            entry.timer = self._call_later(
                request.timeout, lambda: self.answer(entry, entry.reply("abort"))
            )
        self.tokenizers.submit(entry)

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
                self.failures.on_defect(entry)

    def _on_delta(self, entry: Entry, delta: TextDelta, now: float) -> None:
        if entry.migrated_from:
            self._router.release_migrated(entry, delta.attempt)
        num_tokens, num_bytes = len(entry.token_ids), entry.num_bytes
        try:
            is_new = entry.append(delta)
        except GapError as error:
            self.failures.on_gap(entry, error)
            return
        self._ledger.record_growth(entry, num_bytes)
        num_new = len(entry.token_ids) - num_tokens
        if num_new or delta.pooled:
            entry.record_tokens(self.metrics, num_new, now)
        if is_new and delta.finish_reason:
            self.answer(entry, entry.reply(delta.finish_reason))
        elif is_new and entry.is_stream:
            self.clients.deliver(entry)

    def on_tokenized(self, request_id: str, attempt: int, num_tokens: int, by: bytes) -> None:
        """Record that a tokenizer has passed a prompt of `num_tokens` on."""
        if entry := self._ledger.get(request_id):
            self._router.release_migrated(entry, attempt)
            self._ledger.record_tokenized(entry, num_tokens, by)
        else:  # ended meanwhile
            self._router.release_everywhere(request_id, attempt)

    def on_heartbeat(self) -> None:
        self._admission.sample(time.monotonic())
        for query in self.queries.take_closed():
            self.tokenizers.forget(query)

    def answer(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        self._end(entry, reply)
        self._ledger.answer(entry, reply)
        self.clients.deliver(entry)

    def drop(self, entries: Iterable[Entry]) -> None:
        """End requests, answered or not, whose client can't get the answer."""
        self.failures.for_each(entries, self._drop)

    def _drop(self, entry: Entry) -> None:
        if entry.answer is None:
            self._end(entry, entry.reply("abort"))
        self.clients.release(entry)

    def _end(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        entry.record_end(self.metrics, reply, time.monotonic())
        if self.tracer.is_on:
            self._write_span(entry, reply)
        if isinstance(reply, ErrorReply) or log.isEnabledFor(logging.DEBUG):
            self.failures.log_end(entry, reply)
        if entry.timer:
            entry.timer.cancel()
        self.tokenizers.forget(entry)
        self._router.unassign(entry)
        self._router.release(entry.replica, entry.request_id, entry.attempt)

    def _write_span(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        """Write the span of the whole request, which has ended."""
        attributes = {
            "gen_ai.usage.input_tokens": entry.num_prompt_tokens,
            "gen_ai.usage.output_tokens": len(entry.token_ids),
            "gen_ai.response.finish_reasons": [getattr(reply, "finish_reason", "error")],
            "penstock.cached_tokens": entry.num_cached_tokens,
            "penstock.num_attempts": entry.num_attempts,
        }
        rest: Any = {"error": getattr(reply, "message", ""), "is_root": True}
        if entry.first_token_at:
            rest["events"] = {"first token": entry.first_token_at}
        self.tracer.span("request", entry.request_id, entry.accepted_at, attributes, **rest)
