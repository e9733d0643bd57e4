"""The life of a request, from its admission to its release, and its failures.

A delta passes four objects between the socket of the detokenizers and the clients' socket:
`Gateway.on_results` → `Requests.on_deltas` → `Request.append` → `ClientSocket.deliver`.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from uuid import uuid4

import zmq

from penstock.protocol.config import replica_of
from penstock.protocol.messages.client import ErrorReply, GenerateReply, GenerateRequest
from penstock.protocol.messages.pipeline import (
    FromTokenizer,
    RequestFailed,
    StreamDelta,
    ToGateway,
    TokenizerReply,
)
from penstock.protocol.messages.status import Metrics, SchedulerStatus
from penstock.protocol.poison import MAX_DEATHS, REFUSED
from penstock.protocol.tokenizer_file import read_generation_config
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.event_loop import CallLater
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import FailureLog, Process
from penstock.services.gateway.admission import Admission, RefusedError, Validation, check_same
from penstock.services.gateway.clients import ClientSocket
from penstock.services.gateway.ledger import Ledger, Queries, Query, Work
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
from penstock.services.gateway.tokenizers import TokenizerPoison, Tokenizers, digest

log = logging.getLogger("gateway")
DEFECT = "the gateway failed at this request; its log has the reason"
GIVEN_UP = f"{MAX_DEATHS} tokenizers died while they worked at the request; it is not tried again"


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
        self.poison = TokenizerPoison(DeathReports(process))
        self._failed = FailureLog(log)
        self.tokenizers = Tokenizers(
            self.to_tokenizers,
            self.poison,
            on_lost=self._resubmit_passed_on_by,
            on_poison=self._on_poison,
            on_defect=self.on_defect,
        )

    @property
    def is_ready(self) -> bool:
        return self.router.is_ready and len(self.tokenizers.peers) > 0

    # ---- admission -----------------------------------------------------------------------------

    def submit(self, client: Client, message: GenerateRequest, num_bytes: int) -> None:
        """Accept a request, or attach the client to an open request. Raises RefusedError."""
        self._check_poison(message)
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
        self._check_poison(message)
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

    def on_deltas(self, deltas: list[StreamDelta], now: float) -> None:
        """Deliver new output at `now` of `time.monotonic`. An exception fails its request only."""
        for delta in deltas:
            request = self._ledger.get(delta.request_id)
            if request is None:
                self.router.release_everywhere(delta.request_id, delta.attempt)
                continue
            try:
                self._on_delta(request, delta, now)
            except Exception:  # noqa: BLE001
                self.on_defect(request)

    def _on_delta(self, request: Request, delta: StreamDelta, now: float) -> None:
        if request.migrated_from:
            self.router.release_migrated(request, delta.attempt)
        num_tokens, num_bytes = len(request.token_ids), request.num_bytes
        try:
            is_new = request.append(delta)
        except GapError as error:
            self._on_gap(request, error)
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
            self._resubmit_all(status.replica)
        self._migrate_stranded()
        return True

    def on_scheduler_reconnect(self, replica: int) -> None:
        """Resubmit all requests of a scheduler that reconnected. Leases end other requests."""
        self.router.announce_gateway(replica, self._ledger.new_first_attempt())
        self._resubmit_all(replica)

    def on_processes(self, names: list[str]) -> None:
        """Record which processes run. Migrate the requests of schedulers that do not run."""
        schedulers = [name for name in names if name.startswith(f"{self.config.prefix}scheduler.")]
        self.router.record_running({replica_of(name, self.config) for name in schedulers})
        self._migrate_stranded()

    def on_heartbeat(self) -> None:
        """Drop silent peers, and queries of clients that have disconnected."""
        self.tokenizers.lose_silent()
        self.router.on_heartbeat()
        self._migrate_stranded()
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
        self._for_each(requests, self._drop)

    def _drop(self, request: Request) -> None:
        if request.answer is None:
            self._end(request, request.reply("abort"))
        self._clients.release(request)

    def _end(self, request: Request, reply: GenerateReply | ErrorReply) -> None:
        request.record_end(self.metrics, reply, time.monotonic())
        if self.tracer.is_on:
            self._write_span(request, reply)
        if isinstance(reply, ErrorReply) or log.isEnabledFor(logging.DEBUG):
            self._log_end(request, reply)
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

    # ---- a process is lost: requests are submitted once more, and resume after their tokens -----

    def _resubmit_all(self, replica: int) -> None:
        """Resubmit all requests of a replica after its scheduler has restarted or reconnected."""
        if requests := self.router.requests_of(replica):
            name = f"{self.config.prefix}scheduler.{replica + 1}"
            log.warning("resubmitting %d requests that %s may lack", len(requests), name)
        self._for_each(requests, self._resubmit)

    def _resubmit_passed_on_by(self, tokenizer: bytes) -> None:
        """Resubmit requests that a lost tokenizer has sent on: the scheduler may lack them."""
        self._for_each(self._ledger.passed_on_by(tokenizer), self._resubmit)

    def _migrate_stranded(self) -> None:
        """Migrate requests from replicas that are down to replicas that run."""
        if requests := self.router.stranded():
            log.warning("a replica is down; migrating %d requests to others", len(requests))
        self._for_each(requests, self._resubmit)

    def _on_gap(self, request: Request, error: GapError) -> None:
        """Resubmit a request that has lost part of its output."""
        extra = {"request_id": request.request_id}
        log.warning("%s: %s; resubmitting it", request.request_id, error, extra=extra)
        self._resubmit(request)

    def _resubmit(self, request: Request) -> None:
        self.router.migrate(request)
        self._ledger.begin_attempt(request)
        self.tokenizers.submit(request)

    def _for_each(self, requests: Iterable[Request], handle: Callable[[Request], None]) -> None:
        """Call `handle` for each request. An exception fails only its own request."""
        for request in requests:
            try:
                handle(request)
            except Exception:  # noqa: BLE001
                self.on_defect(request)

    # ---- a request fails -----------------------------------------------------------------------

    def on_failed(self, message: RequestFailed) -> None:
        """Fail a request that can't be served, and equal requests if the request is poison."""
        request = self._ledger.get(message.request_id)
        if request and request.attempt == message.attempt:
            self._fail(request, message.error)
            if message.is_poison:
                self._fail_duplicates(request.message)

    def on_defect(self, work: Work) -> None:
        """Fail a request or query in an `except` block, after an exception in the gateway."""
        if isinstance(work, Query):
            log.exception("a query raised and is failed")
            self._fail_query(work, DEFECT)
            return
        request_id, extra = work.request_id, {"request_id": work.request_id}
        log.exception("request %s raised and is failed", request_id, extra=extra)
        try:
            if isinstance(work.answer, ErrorReply):  # an error reply that can't be delivered
                self._clients.release(work)
            else:
                work.mark_delivered()  # skip output that may be impossible to encode
                self._fail(work, ErrorReply(code="failed", message=DEFECT))
        except Exception:
            log.exception("request %s is dropped", request_id, extra=extra)
            self._clients.release(work)

    def _on_poison(self, work: Work) -> None:
        if isinstance(work, Query):
            self._fail_query(work, GIVEN_UP)
        elif work.is_open:
            self._fail(work, ErrorReply(code="failed", message=GIVEN_UP))
        self._fail_duplicates(work.message)

    def _fail_query(self, query: Query, message: str) -> None:
        if self.queries.end(query.key):
            self._clients.reply(query.client, ErrorReply(code="failed", message=message))

    def _fail(self, request: Request, error: ErrorReply) -> None:
        error.request_id = request.request_id
        self.answer(request, error)

    def _fail_duplicates(self, message: WorkRequest) -> None:
        """Refuse a poison request from now on. Fail equal open requests that have no output."""
        poison = self.poison.give_up(message)
        for request in self.router.requests:
            if not request.token_ids and digest(request.message) == poison:
                self._fail(request, ErrorReply(code="failed", message=REFUSED))

    def _check_poison(self, message: WorkRequest) -> None:
        """Raise RefusedError for a poison request."""
        if self.poison.known and self.poison.is_poison(message):
            raise RefusedError(REFUSED, code="failed")

    # ---- the log of requests, without their text -----------------------------------------------

    def log_refusal(self, client: Client, reply: ErrorReply) -> None:
        """Log a refused request. HTTP servers log the refusals of their own requests."""
        if not client.connection.is_inner:
            text = "a request is refused: %s, field %s"
            self._failed.write(text, reply.code, reply.field, request_id=reply.request_id)

    def _log_end(self, request: Request, reply: GenerateReply | ErrorReply) -> None:
        """Log the end of a request."""
        request_id, model = request.request_id, request.totals.name
        num_tokens = len(request.token_ids)
        if isinstance(reply, ErrorReply):
            text = "request %s of %s fails after %d tokens: %s"
            values = (request_id, model, num_tokens, reply.code)
            self._failed.write(text, *values, request_id=request_id)
            return
        log.debug(
            "request %s of %s: %d prompt tokens, %d of them cached, %d output tokens, %s, "
            "first token after %.0f ms, whole after %.0f ms",
            *(request_id, model, request.num_prompt_tokens, request.num_cached_tokens),
            *(num_tokens, reply.finish_reason),
            max(0.0, request.first_token_at - request.accepted_at) * 1000,
            (time.monotonic() - request.accepted_at) * 1000,
            extra={"request_id": request_id},
        )
