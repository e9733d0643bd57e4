"""The life of a request, from its admission to its release.

A delta passes four objects between the socket of the detokenizers and the clients' socket:
`Gateway.on_results` → `Requests.on_deltas` → `Request.append` → `ClientSocket.deliver`.
"""

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any
from uuid import uuid4

import zmq

from penstock.protocol.config import replica_of
from penstock.protocol.messages.client import ErrorReply, GenerateReply, GenerateRequest, TextDelta
from penstock.protocol.messages.pipeline import FromTokenizer, ToGateway, TokenizerReply
from penstock.protocol.messages.status import Metrics, SchedulerStatus
from penstock.protocol.tokenizer_file import read_generation_config
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.process import Process
from penstock.services.gateway.admission import Admission, RefusedError, Validation, check_same
from penstock.services.gateway.clients import ClientSocket
from penstock.services.gateway.failures import Failures
from penstock.services.gateway.ledger import Ledger, Queries
from penstock.services.gateway.request import (
    Client,
    GapError,
    Request,
    Share,
    TokenizerRequest,
    WorkRequest,
    estimated_tokens,
)
from penstock.services.gateway.router import Router
from penstock.services.gateway.tokenizers import Tokenizers

log = logging.getLogger("gateway")


class Requests:
    """The requests of one model, and the processes that serve them.

    A gateway that restarts during a drain has lost its requests, so it accepts two kinds of
    resubmitted requests: requests that still run (the scheduler holds a lease on their ids), and
    requests with `output_token_ids`, which continue.
    """

    def __init__(
        self, process: Process, ledger: Ledger, clients: ClientSocket, call_later: CallLater
    ) -> None:
        self.config = config = process.config
        self.name = config.model_name
        self._ledger, self._clients, self._call_later = ledger, clients, call_later
        self._generation = read_generation_config(config.model_folder)
        self.validation = Validation(config)
        self.totals = Share(self.name)
        self._admission = Admission(config, self.totals)
        self.metrics = Metrics.empty(self.validation.max_model_len)
        self.tracer = Tracer(config, process.name)
        self.queries = Queries(ledger.first_attempt, self.totals)
        self.is_draining = False
        context, at = process.context, process.endpoints
        self.results = context.bind(zmq.PULL, at.results, ToGateway)
        self.to_tokenizers = context.bind(zmq.ROUTER, at.tokenizers, FromTokenizer)
        to_schedulers: list[Channel[Any]] = [
            context.connect(
                zmq.PUSH, there.requests, on_reconnect=partial(self.on_scheduler_reconnect, replica)
            )
            for replica, there in enumerate(process.all_endpoints)
        ]
        self.router = Router(to_schedulers, config.routing, ledger.first_attempt)
        for replica in range(config.dp):
            self.router.announce_gateway(replica, ledger.first_attempt)
        self.failures = Failures(
            process,
            ledger,
            clients,
            self.router,
            self.queries,
            submit=lambda request: self.tokenizers.submit(request),
            answer=self.answer,
        )
        self.tokenizers = Tokenizers(
            self.to_tokenizers,
            self.failures.poison,
            on_lost=self.failures.resubmit_passed_on_by,
            on_poison=self.failures.on_poison,
            on_defect=self.failures.on_defect,
        )

    @property
    def is_ready(self) -> bool:
        return self.router.is_ready and len(self.tokenizers.peers) > 0

    # ---- admission -----------------------------------------------------------------------------

    def submit(self, client: Client, message: GenerateRequest, num_bytes: int) -> None:
        """Accept a request, or attach the client to an open request. Raises RefusedError."""
        if self.failures.poison.known:
            self.failures.check_poison(message)
        request = self._ledger.find(message.request_id) if message.request_id else None
        if request is None:
            self._accept(client, message, num_bytes)
        else:
            check_same(message, request.message)
            self._clients.adopt(request, client)

    def submit_query(self, client: Client, message: TokenizerRequest, num_bytes: int) -> None:
        """Accept a query, which a tokenizer answers. Raises RefusedError."""
        if client.connection.is_closed:
            return
        if self.failures.poison.known:
            self.failures.check_poison(message)
        self._check_drain(message)
        self._admission.check(num_bytes, estimated_tokens(message), client.share)
        self.validation.check_query(message)
        self.tokenizers.submit(self.queries.open(client, message, num_bytes))

    def abort(self, client: Client, request_id: str) -> bool:
        """End a request with its output. Return False if it is not open, or not the client's."""
        request = self._ledger.get(request_id)
        owner = request and request.client.connection
        if not request or not owner or not (owner.is_closed or owner is client.connection):
            return False
        self.answer(request, request.reply("abort"))
        return True

    def _accept(self, client: Client, message: GenerateRequest, num_bytes: int) -> None:
        self._check_drain(message)
        request_id = message.request_id or uuid4().hex
        request = Request(message, request_id, client, num_bytes, self._generation)
        self._admission.check(num_bytes, request.num_waiting_tokens, client.share)
        self.validation.check(message, is_req_socket=client.envelope[-1] == b"")
        self._ledger.open(request, self.totals)
        self.router.assign(request)
        if message.timeout is not None:
            request.timer = self._call_later(
                message.timeout, lambda: self.answer(request, request.reply("abort"))
            )
        self.tokenizers.submit(request)

    def _check_drain(self, message: WorkRequest) -> None:
        if not self.is_draining:
            return
        if isinstance(message, GenerateRequest):
            known = message.request_id and self.router.may_have(message.request_id)
            if known or message.output_token_ids:
                return
        raise RefusedError("the pipeline is stopping and accepts no requests", code="overloaded")

    # ---- output --------------------------------------------------------------------------------

    def on_tokenized(self, request_id: str, attempt: int, num_tokens: int, by: bytes) -> None:
        """Record that tokenizer `by` has sent a prompt of `num_tokens` to the scheduler."""
        if request := self._ledger.get(request_id):
            self.router.release_migrated(request, attempt)
            self._ledger.record_tokenized(request, num_tokens, by)
        else:  # the request has ended meanwhile
            self.router.release_everywhere(request_id, attempt)

    def on_query_reply(self, message: TokenizerReply) -> None:
        """Send a tokenizer's reply to the client. Drop a second reply to the same query."""
        if query := self.queries.end(message.number):
            self._clients.reply(query.client, message.reply)
        if isinstance(message.reply, ErrorReply):
            self.metrics.count_failure(message.reply.code)

    def on_deltas(self, deltas: list[TextDelta], now: float) -> None:
        """Deliver new output at `now` of `time.monotonic`. An exception fails its request only."""
        for delta in deltas:
            request = self._ledger.get(delta.request_id)
            if request is None:
                self.router.release_everywhere(delta.request_id, delta.attempt)
                continue
            try:
                self._on_delta(request, delta, now)
            except Exception:  # noqa: BLE001
                self.failures.on_defect(request)

    def _on_delta(self, request: Request, delta: TextDelta, now: float) -> None:
        if request.migrated_from:
            self.router.release_migrated(request, delta.attempt)
        num_tokens, num_bytes = len(request.token_ids), request.num_bytes
        try:
            is_new = request.append(delta)
        except GapError as error:
            self.failures.on_gap(request, error)
            return
        self._ledger.record_growth(request, num_bytes)
        num_new = len(request.token_ids) - num_tokens
        if num_new or delta.pooled:
            request.record_tokens(self.metrics, num_new, now)
        if is_new and delta.finish_reason:
            self.answer(request, request.reply(delta.finish_reason))
        elif is_new and request.is_stream:
            self._clients.deliver(request)

    # ---- schedulers and heartbeats -------------------------------------------------------------

    def on_scheduler(self, status: SchedulerStatus) -> bool:
        """Record a scheduler's status. Return False if the status is outdated.

        If the status has a new epoch (the first epoch is new), resubmit the scheduler's requests.
        """
        has_restarted = self.router.record_status(status)
        if has_restarted is None:
            return False
        if has_restarted:
            self.failures.resubmit_all(status.replica)
        self.failures.migrate_stranded()
        return True

    def on_scheduler_reconnect(self, replica: int) -> None:
        """Resubmit all requests of a scheduler that reconnected. Leases end other requests."""
        self.router.announce_gateway(replica, self._ledger.new_first_attempt())
        self.failures.resubmit_all(replica)

    def on_processes(self, names: list[str]) -> None:
        """Record which processes run. Migrate the requests of schedulers that do not run."""
        schedulers = [name for name in names if name.startswith(f"{self.config.prefix}scheduler.")]
        self.router.record_running({replica_of(name, self.config) for name in schedulers})
        self.failures.migrate_stranded()

    def on_heartbeat(self) -> None:
        """Drop silent peers, and queries of clients that have disconnected."""
        self.tokenizers.lose_silent()
        self.router.on_heartbeat()
        self.failures.migrate_stranded()
        self._admission.sample(time.monotonic())
        for query in self.queries.take_closed():
            self.tokenizers.forget(query)

    # ---- the end -------------------------------------------------------------------------------

    def answer(self, request: Request, reply: GenerateReply | ErrorReply) -> None:
        self._end(request, reply)
        self._ledger.answer(request, reply)
        self._clients.deliver(request)

    def drop(self, requests: Iterable[Request]) -> None:
        """End and release requests whose client can't get the answer, answered or not."""
        self.failures.for_each(requests, self._drop)

    def _drop(self, request: Request) -> None:
        if request.answer is None:
            self._end(request, request.reply("abort"))
        self._clients.release(request)

    def _end(self, request: Request, reply: GenerateReply | ErrorReply) -> None:
        request.record_end(self.metrics, reply, time.monotonic())
        if self.tracer.is_on:
            self._write_span(request, reply)
        if isinstance(reply, ErrorReply) or log.isEnabledFor(logging.DEBUG):
            self.failures.log_end(request, reply)
        if request.timer:
            request.timer.cancel()
        self.tokenizers.forget(request)
        self.router.unassign(request)
        self.router.release(request.replica, request.request_id, request.attempt)

    def _write_span(self, request: Request, reply: GenerateReply | ErrorReply) -> None:
        """Write the trace span of a request that has ended."""
        attributes = {
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": len(request.token_ids),
            "gen_ai.response.finish_reasons": [getattr(reply, "finish_reason", "error")],
            "penstock.cached_tokens": request.num_cached_tokens,
            "penstock.num_attempts": request.num_attempts,
        }
        options: Any = {"error": getattr(reply, "message", ""), "is_root": True}
        if request.first_token_at:
            options["events"] = {"first token": request.first_token_at}
        self.tracer.span("request", request.request_id, request.accepted_at, attributes, **options)
