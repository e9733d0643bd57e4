"""What becomes of a request between its acceptance and its answer."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from penstock.protocol.checkpoint import (
    max_request_bytes,
    read_generation_config,
    read_model_config,
)
from penstock.protocol.config import Config
from penstock.protocol.messages.client import (
    Codec,
    ErrorReply,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Request,
    TextDelta,
)
from penstock.protocol.messages.scheduler import GatewayStarted, ReleaseRequest
from penstock.protocol.messages.tokenizer import TokenizeRequest, TokenizerQuery
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import DECODE_ERRORS, Channel
from penstock.protocol.transport.event_loop import CallLater
from penstock.services.gateway.admission import Overload
from penstock.services.gateway.connections import Client, Connection, Connections
from penstock.services.gateway.delivery import Outbox
from penstock.services.gateway.drain import Drain
from penstock.services.gateway.entry import Entry, GapError
from penstock.services.gateway.estimates import estimated_tokens
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.metrics import Statistics
from penstock.services.gateway.request_trace import trace_request
from penstock.services.gateway.router import Replicas
from penstock.services.gateway.tokenizer_queries import (
    AskedTokenizer,
    Questions,
    num_question_tokens,
)
from penstock.services.gateway.tokenizers import Tokenizers
from penstock.services.gateway.validation import Admission, RefusedError, decode_request, is_same

log = logging.getLogger("gateway")
UNREAD = "it does not read its answers (--max-unread-bytes)"
DEFECT = "the gateway failed at this request; its log has the reason"


class Requests:
    """Accepts requests, begins them again, ends them."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        connections: Connections,
        outbox: Outbox,
        tokenizers: Tokenizers,
        questions: Questions,
        replicas: Replicas,
        tracer: Tracer,
        to_schedulers: list[Channel[Any]],
        call_later: CallLater,
        disconnect: Callable[[Connection, str], None],
    ) -> None:
        """disconnect: ends a client's connection, for a reason."""
        self._generation = read_generation_config(config.model_folder)
        self._admission = Admission(config, read_model_config(config.model_folder))
        self.statistics = Statistics(self._admission.max_model_len)
        self._overload = Overload(config, ledger, questions)
        self._max_request_bytes = max_request_bytes(config)
        self._ledger = ledger
        self._connections = connections
        self._outbox = outbox
        self._tokenizers = tokenizers
        self._questions = questions
        self._replicas = replicas
        self._tracer, self._to_schedulers, self._call_later = tracer, to_schedulers, call_later
        self._disconnect = disconnect
        self.drain = Drain(replicas)

    def decode(self, codec: Codec, frame: bytes) -> Request:
        """As `decode_request`."""
        limits = self._max_request_bytes, self._admission.max_model_len
        return decode_request(codec, frame, *limits)

    def ask(self, client: Client, request: GenerateRequest, num_bytes: int) -> None:
        """A client asks, with a frame of so many bytes; perhaps for what it has asked for before.
        Raises RefusedError."""
        entry = self._ledger.find(request.request_id) if request.request_id else None
        if entry is None:
            self._accept(client, request, num_bytes)
        elif is_same(request, entry.request):
            self._adopt(entry, client)
        else:
            raise RefusedError(
                f"another request with request_id {entry.request_id!r} is open already",
                "request_id",
            )

    def ask_tokenizer(self, client: Client, question: AskedTokenizer, num_bytes: int) -> None:
        """A client asks what a tokenizer answers alone. Raises RefusedError."""
        self.drain.check(question)
        self._overload.check(num_bytes, num_question_tokens(question), client.share)
        self._admission.check_question(question)
        self._check_encoding(TokenizerQuery(0, question))
        self._questions.ask(client, question, num_bytes)

    def abort(self, request_id: str) -> bool:
        """Ends a request with what it has; False if it is not open."""
        if entry := self._ledger.get(request_id):
            self._finish(entry, "abort")
        return entry is not None

    def fail(self, entry: Entry, error: ErrorReply) -> None:
        """Answers a request with an error."""
        error.request_id = entry.request_id
        self._answer(entry, error)

    def release_unknown(self, request_id: str, attempt: int) -> None:
        """Some scheduler goes on with what is over here. It has a lease for what an earlier gateway
        has begun: somebody may yet ask for it."""
        if attempt >= self._ledger.first_attempt:
            for replica in range(len(self._to_schedulers)):
                self._release(replica, request_id, attempt)

    def release_left(self, entry: Entry, attempt: int) -> None:
        """A scheduler goes on, or is about to, with what another one has now."""
        if (replica := entry.left.get(attempt)) is not None:
            self._release(replica, entry.request_id, attempt)

    def _release(self, replica: int, request_id: str, attempt: int) -> None:
        self._to_schedulers[replica].send(ReleaseRequest(request_id, attempt))

    def on_deltas(self, deltas: list[TextDelta], now: float) -> None:
        """Passes new text on, at `now` of time.monotonic; a request that raises is failed alone."""
        for delta in deltas:
            try:
                self.on_delta(delta, now)
            except Exception:  # noqa: BLE001
                if entry := self._ledger.find(delta.request_id):
                    self.on_defect(entry)

    def on_delta(self, delta: TextDelta, now: float) -> None:
        """As `on_deltas`."""
        entry = self._ledger.get(delta.request_id)
        if entry is None:
            self.release_unknown(delta.request_id, delta.attempt)
            return
        if entry.left:
            self.release_left(entry, delta.attempt)
        num_tokens = len(entry.token_ids)
        try:
            is_new = self._ledger.append(entry, delta)
        except GapError as error:
            named = {"request_id": entry.request_id}
            log.warning("%s: %s; it begins again there", entry.request_id, error, extra=named)
            self._ledger.begin_attempt(entry)
            self._tokenizers.submit(entry)
            return
        if num_new := len(entry.token_ids) - num_tokens:
            self.statistics.got_tokens(entry, num_new, now)
        if is_new and delta.finish_reason:
            self._finish(entry, delta.finish_reason)
        elif is_new and entry.request.stream:
            self._outbox.deliver(entry)

    def introduce(self, replica: int, first_attempt: int) -> None:
        """Have a scheduler serve this gateway, from this attempt on."""
        self._replicas.introduced(replica, first_attempt)
        self._to_schedulers[replica].send(GatewayStarted(first_attempt))

    def resubmit_all(self, replica: int) -> None:
        """Its scheduler is a new one and knows nothing."""
        entries = self._replicas.entries(replica)
        if entries:
            log.warning("scheduler.%d is a new one: %d requests go on", replica + 1, len(entries))
        self.each(entries, self.again)

    def migrate_lost(self) -> None:
        """What a replica can't run goes on in another one."""
        entries = self._replicas.lost()
        if entries:
            log.warning("a replica is down: %d requests go on in others", len(entries))
        self.each(entries, self.again)

    def each(self, entries: Iterable[Entry], handle: Callable[[Entry], None]) -> None:
        """Calls `handle` with each entry; an entry at which it raises is failed, alone."""
        for entry in entries:
            try:
                handle(entry)
            except Exception:  # noqa: BLE001
                self.on_defect(entry)

    def on_defect(self, entry: Entry) -> None:
        """Ends a request that raises, in an `except` block: other requests continue."""
        named = {"request_id": entry.request_id}
        log.exception("request %s raised and is failed", entry.request_id, extra=named)
        try:
            self.fail(entry, ErrorReply(code="failed", message=DEFECT))
        except Exception:
            log.exception("request %s is dropped", entry.request_id, extra=named)
            self._outbox.close(entry)

    def again(self, entry: Entry) -> None:
        """Submits a request once more, to go on behind the tokens that it has."""
        attempt = entry.attempt
        left = self._replicas.place_again(entry)
        self._ledger.begin_attempt(entry)
        if left is not None:
            entry.left[attempt] = left
            self.release_left(entry, attempt)
        self._tokenizers.submit(entry)

    def on_heartbeat(self) -> None:
        """Gives up clients that are gone, and those that do not read."""
        self._overload.sample(time.monotonic())
        self._questions.on_heartbeat()
        lost = map(self._ledger.find, self._connections.take_lost())
        self.each(filter(None, lost), self._drop)
        for connection in self._outbox.on_heartbeat():
            self._cut_off(connection)

    def _accept(self, client: Client, request: GenerateRequest, num_bytes: int) -> None:
        """Writes a request into the ledger and sends it on its way."""
        self.drain.check(request)
        self._overload.check(num_bytes, estimated_tokens(request), client.share)
        self._admission.check(request, is_req_socket=client.envelope[-1] == b"")
        entry = Entry(request, request.request_id or uuid4().hex, client, num_bytes)
        entry.accepted_at = time.monotonic()
        self._generation.fill(entry.sampling)
        self._check_encoding(entry.submission())
        self._ledger.add(entry)
        self._replicas.place(entry)
        self._connections.add(entry.request_id, client)
        if request.timeout is not None:
            entry.timer = self._call_later(request.timeout, lambda: self._finish(entry, "abort"))
        self._tokenizers.submit(entry)

    def _check_encoding(self, submission: TokenizeRequest | TokenizerQuery) -> None:
        """What is accepted can be sent on, now and after a restart. Raises RefusedError."""
        try:
            self._tokenizers.check(submission)
        except DECODE_ERRORS as error:
            raise RefusedError(f"request can't be encoded as MessagePack: {error}") from error

    def _adopt(self, entry: Entry, client: Client) -> None:
        """Who asked last gets the answer, from its start."""
        request_id, previous = entry.request_id, entry.client
        self._connections.remove(request_id, previous)
        if previous.connection is not client.connection:
            message = f"request {request_id!r} is answered on another connection now"
            moved = ErrorReply(code="failed", message=message, request_id=request_id)
            self._outbox.reply(previous, moved)
        entry.client = client
        entry.rewind()
        self._connections.add(request_id, client)
        self._outbox.deliver(entry)

    def _finish(self, entry: Entry, reason: FinishReason) -> None:
        """Answers a request with all its text."""
        self._answer(entry, entry.reply(reason))

    def _answer(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        """The last word to a request."""
        self._end(entry, reply)
        self._ledger.answer(entry, reply)
        self._outbox.deliver(entry)

    def _drop(self, entry: Entry) -> None:
        """Ends a request, answered or not, whose client can't get the answer."""
        if entry.answer is None:
            self._end(entry, entry.reply("abort"))
        self._outbox.close(entry)

    def _end(self, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
        """Nothing works at a request any more."""
        self.statistics.ended(entry, reply, time.monotonic())
        if self._tracer.is_on:
            trace_request(self._tracer, entry, reply)
        if entry.timer:
            entry.timer.cancel()
        self._tokenizers.forget(entry)
        self._replicas.end(entry)
        self._release(entry.replica, entry.request_id, entry.attempt)

    def _cut_off(self, connection: Connection) -> None:
        """Ends the requests of a client that does not read, and its connection."""
        log.warning(
            "a client has left %d bytes of answers unread: its %d requests are aborted",
            self._outbox.num_unread_bytes(connection),
            len(connection.request_ids),
        )
        entries = [self._ledger.find(request_id) for request_id in connection.request_ids]
        self.each(filter(None, entries), self._drop)
        self._disconnect(connection, UNREAD)
