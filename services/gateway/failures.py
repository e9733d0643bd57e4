"""Failure handling: requests of lost processes are resubmitted; failed requests are answered."""

import logging
import time
from collections.abc import Callable, Iterable

from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.protocol.messages.pipeline import RequestFailed
from penstock.protocol.poison import MAX_DEATHS, REFUSED
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import FailureLog, Process
from penstock.services.gateway.admission import RefusedError
from penstock.services.gateway.clients import ClientSocket
from penstock.services.gateway.ledger import Ledger, Queries, Query, Work
from penstock.services.gateway.request import Client, GapError, Request, WorkRequest
from penstock.services.gateway.router import Router
from penstock.services.gateway.tokenizers import TokenizerPoison, digest

log = logging.getLogger("gateway")
DEFECT = "the gateway failed at this request; its log has the reason"
GIVEN_UP = f"{MAX_DEATHS} tokenizers died while they worked at the request; it is not tried again"


class Failures:
    """Handlers of process failures, of failed requests, and of exceptions in the gateway."""

    def __init__(
        self,
        process: Process,
        ledger: Ledger,
        clients: ClientSocket,
        router: Router,
        queries: Queries,
        *,
        submit: Callable[[Request], None],
        answer: Callable[[Request, ErrorReply], None],
    ) -> None:
        """Store the handlers. `submit` sends a request to a tokenizer, `answer` ends a request."""
        self._ledger, self._clients, self._router, self._queries = ledger, clients, router, queries
        self._submit, self._answer = submit, answer
        self._prefix = process.config.prefix
        self._failed = FailureLog(log)
        self.poison = TokenizerPoison(DeathReports(process))

    # ---- a process is lost: requests are submitted once more, and resume after their tokens -----

    def resubmit_all(self, replica: int) -> None:
        """Resubmit all requests of a replica after its scheduler has restarted or reconnected."""
        if requests := self._router.requests_of(replica):
            name = f"{self._prefix}scheduler.{replica + 1}"
            log.warning("resubmitting %d requests that %s may lack", len(requests), name)
        self.for_each(requests, self._resubmit)

    def resubmit_passed_on_by(self, tokenizer: bytes) -> None:
        """Resubmit requests that a lost tokenizer has sent on: the scheduler may lack them."""
        self.for_each(self._ledger.passed_on_by(tokenizer), self._resubmit)

    def migrate_stranded(self) -> None:
        """Migrate requests from replicas that are down to replicas that run."""
        if requests := self._router.stranded():
            log.warning("a replica is down; migrating %d requests to others", len(requests))
        self.for_each(requests, self._resubmit)

    def on_gap(self, request: Request, error: GapError) -> None:
        """Resubmit a request that has lost part of its output."""
        extra = {"request_id": request.request_id}
        log.warning("%s: %s; resubmitting it", request.request_id, error, extra=extra)
        self._resubmit(request)

    def _resubmit(self, request: Request) -> None:
        self._router.migrate(request)
        self._ledger.begin_attempt(request)
        self._submit(request)

    def for_each(self, requests: Iterable[Request], handle: Callable[[Request], None]) -> None:
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

    def on_poison(self, work: Work) -> None:
        if isinstance(work, Query):
            self._fail_query(work, GIVEN_UP)
        elif work.is_open:
            self._fail(work, ErrorReply(code="failed", message=GIVEN_UP))
        self._fail_duplicates(work.message)

    def _fail_query(self, query: Query, message: str) -> None:
        if self._queries.end(query.key):
            self._clients.reply(query.client, ErrorReply(code="failed", message=message))

    def _fail(self, request: Request, error: ErrorReply) -> None:
        error.request_id = request.request_id
        self._answer(request, error)

    def _fail_duplicates(self, message: WorkRequest) -> None:
        """Refuse a poison request from now on. Fail equal open requests that have no output."""
        poison = self.poison.give_up(message)
        for request in self._router.requests:
            if not request.token_ids and digest(request.message) == poison:
                self._fail(request, ErrorReply(code="failed", message=REFUSED))

    def check_poison(self, message: WorkRequest) -> None:
        """Raise RefusedError for a poison request."""
        if self.poison.is_poison(message):
            raise RefusedError(REFUSED, code="failed")

    # ---- the log of requests, without their text -----------------------------------------------

    def log_refusal(self, client: Client, reply: ErrorReply) -> None:
        """Log a refused request. HTTP servers log the refusals of their own requests."""
        if not client.connection.is_inner:
            text = "a request is refused: %s, field %s"
            self._failed.write(text, reply.code, reply.field, request_id=reply.request_id)

    def log_end(self, request: Request, reply: GenerateReply | ErrorReply) -> None:
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
