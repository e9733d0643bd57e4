"""Failures: lost processes, whose work is resubmitted, failed requests, and poison requests."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.protocol.messages.pipeline import RequestFailed, TokenizerReply
from penstock.protocol.poison import REFUSED, PoisonList, digest_of
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import FailureLog, Identity
from penstock.services.gateway.client import Client
from penstock.services.gateway.entry import Entry, GapError
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.requests.queries import Query, Work
from penstock.services.gateway.requests.router import Router
from penstock.services.gateway.validation import RefusedError, WorkRequest

if TYPE_CHECKING:
    from penstock.services.gateway.requests.lifecycle import Requests

log = logging.getLogger("gateway")
DEFECT = "the gateway failed at this request; its log has the reason"
IGNORED_FIELDS = {"seed", "request_id", "stream", "timeout", "priority", "client"}
# fields that do not change what a process has to do for a request
IGNORED_FIELDS |= {"output_token_ids"}
MAX_DEATHS = 2  # of tokenizers that worked at a request and nothing else
GIVEN_UP = f"{MAX_DEATHS} tokenizers died while they worked at the request; it is not tried again"


class TokenizerPoison:
    """Requests at which tokenizers died, by digest: suspects, and those that are refused.

    When a tokenizer dies, any of its work may have killed it. Such suspects get a tokenizer for
    themselves, until it has done them: work that is alone at MAX_DEATHS deaths is given up.
    """

    def __init__(self, reports: DeathReports) -> None:
        self._reports = reports
        self.known = PoisonList()  # empty until a tokenizer has died
        # → deaths at which it was alone
        self.suspects: WeakKeyDictionary[Work, int] = WeakKeyDictionary()

    def num_deaths(self, request: WorkRequest) -> int:
        """Return at how many deaths of tokenizers the same request was the only one."""
        return self.known.num_deaths(digest(request))

    def suspect_if_known(self, work: Work) -> None:
        """Suspect new work if the same request was alone at a death."""
        if num_deaths := self.num_deaths(work.request):
            self.suspects[work] = num_deaths

    def keeps_apart(self, work: Work, others: list[Work]) -> bool:
        """Return whether one is a suspect, work or a tokenizer's only other work."""
        return work in self.suspects or (len(others) == 1 and others[0] in self.suspects)

    def blame(self, tokenizer: bytes, lost: list[Work]) -> Work | None:
        """Suspect the work of a dead tokenizer, by routing id. Return the one that is poison."""
        dead = Identity.decode(tokenizer)
        self._reports.died([(dead.name, dead.pid)], [digest(work.request) for work in lost])
        for work in lost:
            self.suspects.setdefault(work, 0)
        if len(lost) != 1:
            return None
        [work] = lost
        num_deaths = self.suspects[work] = self.suspects[work] + 1
        self.known.put(digest(work.request), num_deaths)
        return work if num_deaths >= MAX_DEATHS else None

    def clear(self, work: Work) -> None:
        """Clear work that a tokenizer has done, if it is a suspect, and equal requests."""
        if self.suspects.pop(work, None) is not None:
            self.known.put(digest(work.request), 0)
            self._reports.clear([digest(work.request)])

    def learn(self, digests: list[bytes]) -> None:
        """Refuse requests that an earlier gateway has given up, as the supervisor reports."""
        for one in digests:
            self.known.put(one, MAX_DEATHS)

    def check(self, request: WorkRequest) -> None:
        if self.num_deaths(request) >= MAX_DEATHS:
            raise RefusedError(REFUSED, code="failed")

    def give_up(self, request: WorkRequest) -> bytes:
        """Refuse a request from now on. Return its digest."""
        poison = digest(request)
        self.known.put(poison, MAX_DEATHS)
        self._reports.found(poison)
        return poison


def digest(request: WorkRequest) -> bytes:
    """Return equal bytes for equal requests, of whichever client."""
    fields = [field for field in request.__struct_fields__ if field not in IGNORED_FIELDS]
    return digest_of(type(request).__name__, [getattr(request, field) for field in fields])


class Failures:
    """The handler of each failure of another process, and of exceptions at one request."""

    def __init__(
        self, ledger: Ledger, router: Router, poison: TokenizerPoison, requests: "Requests"
    ) -> None:
        self._ledger, self._router, self._poison = ledger, router, poison
        self._requests = requests
        self._failed = FailureLog(log)

    # ---- a process is lost -------------------------------------------------------------------

    def resubmit_all(self, replica: int) -> None:
        """Resubmit the requests of a scheduler: it, or this gateway, has restarted."""
        if entries := self._router.entries_of(replica):
            name = f"{self._requests.prefix}scheduler.{replica + 1}"
            log.warning("resubmitting %d requests that %s may lack", len(entries), name)
        self.for_each(entries, self._resubmit)

    def resubmit_passed_on_by(self, tokenizer: bytes) -> None:
        """Resubmit what a tokenizer has passed on: it may have been lost with it."""
        self.for_each(self._ledger.passed_on_by(tokenizer), self._resubmit)

    def migrate_stranded(self) -> None:
        """Migrate what a replica can't run to another one."""
        if entries := self._router.stranded():
            log.warning("a replica is down; migrating %d requests to others", len(entries))
        self.for_each(entries, self._resubmit)

    def on_gap(self, entry: Entry, error: GapError) -> None:
        """Resubmit a request whose output was lost in part."""
        extra = {"request_id": entry.request_id}
        log.warning("%s: %s; resubmitting it", entry.request_id, error, extra=extra)
        self._resubmit(entry)

    def _resubmit(self, entry: Entry) -> None:
        """Submit a request once more, to be resumed after the tokens that it has."""
        self._router.migrate(entry)
        self._ledger.begin_attempt(entry)
        self._requests.tokenizers.submit(entry)

    # ---- a request fails ---------------------------------------------------------------------

    def on_failed(self, message: RequestFailed) -> None:
        """Fail a request that can't be served; if it is poison, equal ones are refused."""
        entry = self._ledger.get(message.request_id)
        if entry and entry.attempt == message.attempt:
            self._fail(entry, message.error)
            if message.is_poison:
                self._fail_duplicates(entry.request)

    def on_poison(self, work: Work) -> None:
        if isinstance(work, Query):
            self._fail_query(work, GIVEN_UP)
        elif work.is_open:
            self._fail(work, ErrorReply(code="failed", message=GIVEN_UP))
        self._fail_duplicates(work.request)

    def on_defect(self, work: Work) -> None:
        """Fail work that raises, in an `except` block: other requests continue."""
        if isinstance(work, Query):
            log.exception("a query raised and is failed")
            self._fail_query(work, DEFECT)
            return
        request_id, extra = work.request_id, {"request_id": work.request_id}
        log.exception("request %s raised and is failed", request_id, extra=extra)
        try:
            if isinstance(work.answer, ErrorReply):  # which can't be delivered
                self._requests.clients.release(work)
            else:
                work.mark_delivered()  # its output may be what can't be encoded
                self._fail(work, ErrorReply(code="failed", message=DEFECT))
        except Exception:
            log.exception("request %s is dropped", request_id, extra=extra)
            self._requests.clients.release(work)

    def for_each(self, entries: Iterable[Entry], handle: Callable[[Entry], None]) -> None:
        """Call `handle` with each entry; an entry at which it raises fails, alone."""
        for entry in entries:
            try:
                handle(entry)
            except Exception:  # noqa: BLE001
                self.on_defect(entry)

    # ---- the log of requests, without their text -----------------------------------------------

    def log_refusal(self, client: Client, reply: ErrorReply) -> None:
        """Log a request that is not accepted; those of `http` have a line there."""
        if not client.connection.is_inner:
            text = "a request is refused: %s, field %s"
            self._failed.write(text, reply.code, reply.field, request_id=reply.request_id)

    def log_end(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        """Log a request that has ended."""
        name, model = entry.request_id, entry.totals.name
        if isinstance(reply, ErrorReply):
            text = "request %s of %s fails after %d tokens: %s"
            number = len(entry.token_ids)
            self._failed.write(text, name, model, number, reply.code, request_id=name)
            return
        log.debug(
            "request %s of %s: %d prompt tokens, %d of them cached, %d output tokens, %s, "
            "first token after %.0f ms, whole after %.0f ms",
            *(name, model, entry.num_prompt_tokens, entry.num_cached_tokens),
            *(len(entry.token_ids), reply.finish_reason),
            max(0.0, entry.first_token_at - entry.accepted_at) * 1000,
            (time.monotonic() - entry.accepted_at) * 1000,
            extra={"request_id": name},
        )

    # ---- helpers -------------------------------------------------------------------------------

    def _fail_query(self, query: Query, message: str) -> None:
        error = ErrorReply(code="failed", message=message)
        self._requests.queries.answer(TokenizerReply(query.key, error))

    def _fail(self, entry: Entry, error: ErrorReply) -> None:
        error.request_id = entry.request_id
        self._requests.answer(entry, error)

    def _fail_duplicates(self, request: WorkRequest) -> None:
        """Refuse a poison request, and fail those that are open and have no output."""
        poison = self._poison.give_up(request)
        for entry in self._router.entries:
            if not entry.token_ids and digest(entry.request) == poison:
                self._fail(entry, ErrorReply(code="failed", message=REFUSED))
