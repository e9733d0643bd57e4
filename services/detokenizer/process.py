"""The detokenizer process: the text streams of each replica, and their sockets."""

import logging
from collections.abc import Sequence
from functools import partial
from time import monotonic

import zmq

from penstock.protocol.messages.client import ErrorReply, FinishReason
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
    StreamDelta,
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
    """A gap in the numbers of a scheduler's messages."""


class Detokenizer:
    """All text streams of one scheduler. No sockets."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._streams: dict[int, TextStream] = {}
        self._epoch = 0
        self._number: int | None = 0  # number of the last message; None: wait for number 1
        self._deltas: list[StreamDelta] = []
        self._stops: list[StopFound] = []  # output of the current step
        # requests whose text can't be made; the caller removes them from the list
        self.failures: list[RequestFailed] = []

    def handle(self, message: StepTokens) -> tuple[list[StreamDelta], list[StopFound]]:
        """Return the text deltas and stops of a step. Raises LostError after a lost message."""
        if message.epoch > self._epoch:  # a new scheduler, which opens its streams again
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
        """Drop all streams after a lost message, until the scheduler opens its streams again."""
        self._streams.clear()
        self._number = None

    def _is_next(self, number: int) -> bool:
        if number == 1:  # the scheduler opens all its streams again
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
        """Report a failed request; other requests continue. Called in an `except` block."""
        named = {"request_id": request.request_id}
        log.exception("text of request %s can't be made", request.request_id, extra=named)
        error = ErrorReply(code="failed", message=DEFECT)
        self.failures.append(RequestFailed(request.request_id, request.attempt, error))

    def _feed(
        self, stream_id: int, token_ids: list[int], logprobs: Sequence[PackedLogprobs | None]
    ) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:  # a stop string ended the stream; the scheduler does not know yet
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
        self, stream_id: int, reason: FinishReason, newest: dict[tuple[str, int], StreamDelta]
    ) -> None:
        """End a stream: extend its delta in `newest`, or add a delta."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        end = stream.end(reason)
        if last := newest.get((end.request_id, end.attempt)):
            last.text += end.text
            last.finish_reason, last.stop_reason = end.finish_reason, end.stop_reason
        else:
            self._deltas.append(end)


def _pooled_delta(opened: StreamOpened) -> StreamDelta:
    """Return the delta of a pooling request, which has numbers and no text."""
    return StreamDelta(
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
    """The sockets of the process, and a `Detokenizer` for each replica."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        table = token_bytes(process.config.model_folder)
        self.tracer = Tracer(process.config, process.name)
        context = process.context
        results = process.endpoints.results
        self.gateway = context.connect(zmq.PUSH, results, on_reconnect=self.reopen_all)
        self.heartbeats = HeartbeatThread(process, to_peers=self.on_heartbeat)
        self.loop = EventLoop(process.context, self.on_heartbeat, self.heartbeats)
        # for traces: replica → stream id → id of the request, and the time when the stream opened
        self.traced: dict[Detokenizer, dict[int, tuple[str, float]]] = {}
        self.tokens: list[Channel[ToDetokenizer]] = []
        self.detokenizers: list[Detokenizer] = []  # a detokenizer for each replica
        for at in process.all_endpoints:
            tokens = context.connect(zmq.DEALER, at.detokenizers, ToDetokenizer, process.identity)
            # a lost StopFound does no harm: the gateway also ends stopped requests
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
        """Ask a scheduler to open all its streams again, because tokens or text may be lost."""
        detokenizer.forget()
        tokens.send(Goodbye())
        tokens.send(Heartbeat(self.name))

    def reopen_all(self) -> None:
        for tokens, detokenizer in zip(self.tokens, self.detokenizers, strict=True):
            self.reopen(tokens, detokenizer)

    def trace(self, streams: dict[int, tuple[str, float]], message: StepTokens) -> None:
        """Write the trace span of each stream that was finished or closed."""
        if message.number == 1:  # the scheduler opens all its streams again
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
