"""The detokenizer's process: the text streams, and sockets around them."""

import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic

import zmq

from penstock.protocol.messages.client import ErrorReply, FinishReason, TextDelta
from penstock.protocol.messages.packed import PackedLogprobs, unpack
from penstock.protocol.messages.pipeline import (
    Confirmed,
    FromDetokenizer,
    Goodbye,
    Heartbeat,
    Refused,
    RequestFailed,
    StepTokens,
    StopFound,
    StreamOpened,
    TextDeltas,
    ToDetokenizer,
)
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process
from penstock.services.detokenizer.text_stream import TextStream, TokenBytes, token_bytes

log = logging.getLogger("detokenizer")
DEFECT = "a defect of the server: the text of the answer can't be made; its log says more"


class LostError(Exception):
    """A message did not arrive."""


class Detokenizer:
    """All streams of one scheduler; no sockets."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._streams: dict[int, TextStream] = {}
        self._epoch = 0
        self._number: int | None = 0  # of the last message; None: only a first one is of use
        self._deltas: list[TextDelta] = []
        self._stops: list[StopFound] = []  # texts and found stops of the step that is being handled
        # requests whose text can't be made, to be taken by the caller
        self.failures: list[RequestFailed] = []

    def handle(self, message: StepTokens) -> tuple[list[TextDelta], list[StopFound]]:
        """Return the step's texts and found stops. Raises LostError if a message is missing."""
        if message.epoch > self._epoch:  # another scheduler: it opens its streams again
            self._epoch = message.epoch
            self._streams.clear()
        if message.epoch < self._epoch or not self._is_next(message.number):
            return [], []
        for stream_id in message.closed:
            self._streams.pop(stream_id, None)
        self._deltas, self._stops = [], []
        for opened in message.opened:
            self._open(opened)
            if opened.finish_reason:
                self._end(opened.stream_id, opened.finish_reason, {})
        stream_ids, token_ids = unpack(message.stream_ids), unpack(message.token_ids)
        logprobs = dict(message.logprobs)
        for index, (stream_id, token_id) in enumerate(zip(stream_ids, token_ids, strict=True)):
            self._feed(stream_id, [token_id], (logprobs.get(index),))
        newest = {}
        if message.finished:
            newest = {(delta.request_id, delta.attempt): delta for delta in self._deltas}
        for stream_id, reason in message.finished:
            self._end(stream_id, reason, newest)
        return self._deltas, self._stops

    def forget(self) -> None:
        """Drop all streams after a loss, until the scheduler opens them again."""
        self._streams.clear()
        self._number = None

    def _is_next(self, number: int) -> bool:
        if number == 1:  # all streams are opened after it
            self._streams.clear()
        elif number and self._number is None:
            return False
        elif number and number != self._number + 1:  # type: ignore[operator]
            raise LostError
        self._number = number
        return True

    def _open(self, opened: StreamOpened) -> None:
        if opened.pooled is not None:
            self._deltas.append(_pooled_delta(opened))
            return
        try:
            self._streams[opened.stream_id] = TextStream(opened, self._table)
        except Exception:  # noqa: BLE001
            self._fail(opened)
        known = list(unpack(opened.output_token_ids))
        self._feed(opened.stream_id, known, opened.logprobs or ())

    def _fail(self, request: StreamOpened | TextStream) -> None:
        """Fail one request, in an `except` block; the others continue."""
        named = {"request_id": request.request_id}
        log.exception("text of request %s can't be made", request.request_id, extra=named)
        error = ErrorReply(code="failed", message=DEFECT)
        self.failures.append(RequestFailed(request.request_id, request.attempt, error))

    def _feed(
        self, stream_id: int, token_ids: list[int], logprobs: Sequence[PackedLogprobs | None]
    ) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:  # ended by a stop string; the scheduler does not know yet
            return
        try:
            self._deltas.append(stream.feed(token_ids, logprobs))
        except Exception:  # noqa: BLE001
            self._fail(stream)
            del self._streams[stream_id]
            return
        if stream.stopped:
            self._stops.append(StopFound(stream.request_id, stream.attempt))
            del self._streams[stream_id]

    def _end(
        self, stream_id: int, reason: FinishReason, newest: dict[tuple[str, int], TextDelta]
    ) -> None:
        """Add the end of a stream to its `newest` delta, or as a delta of its own."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        end = stream.end(reason)
        if last := newest.get((end.request_id, end.attempt)):
            last.text += end.text
            last.finish_reason, last.stop_reason = end.finish_reason, end.stop_reason
        else:
            self._deltas.append(end)


def _pooled_delta(opened: StreamOpened) -> TextDelta:
    """Return the whole answer to a request that has numbers in place of text."""
    return TextDelta(
        request_id=opened.request_id,
        token_offset=0,
        char_offset=0,
        token_ids=[],
        text="",
        finish_reason=opened.finish_reason,
        attempt=opened.attempt,
        prompt_tokens=opened.prompt_tokens,
        cached_tokens=opened.cached_tokens,
        phase_seconds=opened.phase_seconds,
        pooled=opened.pooled,
    )


class DetokenizerProcess:
    """Sockets around a `Detokenizer` for each replica."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        table = token_bytes(process.config.model_folder)
        self.tracer = Tracer(process.config, process.name)
        context = process.context
        results = process.endpoints.results
        self.gateway = context.connect(zmq.PUSH, results, on_reconnect=self.reopen_all)
        self.heartbeats = HeartbeatThread(process, to_peers=self.on_heartbeat)
        self.loop = EventLoop(process.context, self.on_heartbeat, self.heartbeats)
        # streams of each replica → id of the request, and when it was opened; for traces
        self.traced: dict[Detokenizer, dict[int, tuple[str, float]]] = {}
        self.tokens: list[Channel[ToDetokenizer]] = []
        self.detokenizers: list[Detokenizer] = []  # of each replica
        for at in process.all_endpoints:
            where = at.detokenizers
            tokens = context.connect(zmq.DEALER, where, ToDetokenizer, process.identity)
            # the gateway ends what has stopped, too
            scheduler = context.connect(zmq.PUSH, at.requests, on_reconnect=lambda: None)
            detokenizer = Detokenizer(table)
            self.tokens.append(tokens)
            self.detokenizers.append(detokenizer)
            self.loop.add(tokens, partial(self.on_tokens, tokens, scheduler, detokenizer))
            context.on_connected(tokens, self.on_heartbeat)
            context.on_reconnect(tokens, partial(self.reopen, tokens, detokenizer))

    def on_tokens(
        self, tokens: Channel[ToDetokenizer], scheduler: Channel[None], detokenizer: Detokenizer
    ) -> None:
        for _, message in tokens.receive():
            if isinstance(message, Refused):
                raise SystemExit(message.reason)
            try:
                with self.heartbeats.working:
                    deltas, stops = detokenizer.handle(message)
            except LostError:
                self.reopen(tokens, detokenizer)
                continue
            if message.confirm:
                tokens.send(Confirmed())
            while detokenizer.failures:
                self.gateway.send(detokenizer.failures.pop())
            if deltas:
                self.gateway.send(TextDeltas(deltas))
            for stop in stops:
                scheduler.send(stop)
            if self.tracer.is_on:
                self.trace(self.traced.setdefault(detokenizer, {}), message)

    def reopen(self, tokens: Channel[ToDetokenizer], detokenizer: Detokenizer) -> None:
        """Have a scheduler open all its streams again: tokens, or texts, may be lost."""
        detokenizer.forget()
        tokens.send(Goodbye())
        tokens.send(Heartbeat(self.name))

    def reopen_all(self) -> None:
        for tokens, detokenizer in zip(self.tokens, self.detokenizers, strict=True):
            self.reopen(tokens, detokenizer)

    def trace(self, streams: dict[int, tuple[str, float]], message: StepTokens) -> None:
        """Write the span of each stream that has ended, or was closed before its end."""
        if message.number == 1:  # all streams are opened after it
            streams.clear()
        for opened in message.opened:
            streams[opened.stream_id] = opened.request_id, monotonic()
        for stream_id in (*message.closed, *(number for number, _ in message.finished)):
            if ended := streams.pop(stream_id, None):
                self.tracer.span("detokenize", *ended)

    def on_heartbeat(self) -> None:
        self.send_to_schedulers(Heartbeat(self.name))

    def send_to_schedulers(self, message: FromDetokenizer) -> None:
        for tokens in self.tokens:
            tokens.send(message)
