"""The unanswered questions of a client, without sockets.

A restarted gateway may repeat or omit deltas. So every question is kept for resubmission until it
is answered. Only the new part of each `TextDelta` is passed on, and the reply fills in the missing
text at the end. The pieces of a stream always add up to the text of its reply.

The `n` answers to a prompt are one request each, because the gateway answers a request once.
"""

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec

from penstock.protocol.decoding import explain
from penstock.protocol.messages.client import (
    BATCH,
    MSGPACK,
    AbortReply,
    AbortRequest,
    DetokenizeReply,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    Reply,
    ReplyBatch,
    Request,
    TextDelta,
    TokenizeReply,
    TokenLogprobs,
    encode_number,
    split_reply,
)
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.status import StatusReply
from penstock.protocol.transport.channel import DECODE_ERRORS

log = logging.getLogger(__name__)
NO_GATEWAY = "endpoint: got no reply of a Penstock gateway; is it the HTTP port?"
_decode_batch = msgspec.msgpack.Decoder(ReplyBatch).decode
Done = GenerateReply | TokenizeReply | DetokenizeReply | AbortReply | StatusReply
Final = Done | ErrorReply
Take = Callable[[TextDelta], bool]  # receiver of new output; it returns False to refuse the output
# tokens with logprobs that are taken at once: converting more would delay other streams
MAX_PIECE = 64
LOGPROB_BYTES = 256  # approximate memory of a token's logprobs
PATIENCE = 1.0  # seconds within which a client that still reads makes room for a piece
# number of open answers that may each leave the whole limit unread; more answers divide the limit
FAIR_ANSWERS = 16


class ClientError(Exception):
    """The root of all exceptions of a client.

    ClientError
    ├── RequestError      the pipeline refused a request, or failed at it
    └── NoAnswer          nothing arrived within the client's timeout
    """


class RequestError(ClientError):
    """The pipeline refused a request, or failed at it.

    `code` is `invalid`, `overloaded` or `failed`; `field` names the invalid field. `overloaded` has
    `retry_after`, the number of seconds after which a retry may succeed. A prompt that doesn't fit
    into the context has `too_long`: its tokens, and how many fit.
    """

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.code = reply.code
        self.message = reply.message
        self.field = reply.field
        self.request_id = reply.request_id
        self.retry_after = reply.retry_after
        self.too_long = reply.too_long


class NoAnswer(ClientError):  # noqa: N818  `TimeoutError` is taken, and says less
    """Nothing arrived from the pipeline within the client's timeout."""


def ignore_change() -> None:
    """Do nothing, because no task waits. A kept waiter would prevent freeing its answer."""


class PendingRequest:
    """One question, and the replies to it."""

    def __init__(self, number: bytes, question: Request) -> None:
        self.question = question
        self.number = number
        self._frame = MSGPACK.encode(question)
        self.final: Final | None = None
        # for several answers to a prompt: the `request_id` that was given for all
        self.prompt_id: str | None = None
        self.on_change: Callable[[], None] = ignore_change
        # deltas that have arrived and are not taken, joined into few pieces
        self._waiting: deque[TextDelta] = deque()
        self.num_unread = 0  # approximate bytes of `_waiting` beyond its first piece
        # time.monotonic() at which the reader became unable to pass on a piece; inf: it is able
        self.blocked_since = math.inf
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._num_chars = 0

    @property
    def frames(self) -> list[bytes]:
        """Frames to send; a stream continues after the tokens that have arrived."""
        if self._token_ids and isinstance(self.question, GenerateRequest):
            self.question.output_token_ids = self._token_ids
            self._frame = MSGPACK.encode(self.question)
        return [self.number, self._frame]

    def take_delta(self) -> TextDelta | None:
        """Return the stream's output since the last call, or a part of the output."""
        if not self._waiting:
            return None
        delta = self._waiting.popleft()
        self.num_unread = max(0, self.num_unread - _num_bytes(delta)) if self._waiting else 0
        return delta

    def offer(self, take: Take | None) -> bool:
        """Give waiting output to `take`, piece by piece. Return False if a piece is left."""
        while self._waiting:
            if take is None or not take(self._waiting[0]):
                return False
            self.take_delta()
        return True

    def cut(self) -> None:
        """End a stream that its client does not read, and drop its unread output."""
        message = f"the client has left {self.num_unread} bytes unread, which is too much"
        self._waiting.clear()
        self.num_unread = 0
        self.final = ErrorReply(code="failed", message=message, request_id=self.request_id)

    def result(self) -> Done:
        """Return the reply, once `final` is set. Raises RequestError if it is an error."""
        assert self.final is not None  # noqa: S101
        if isinstance(self.final, ErrorReply):
            raise RequestError(self.final)
        return self.final

    def add(self, delta: TextDelta) -> None:
        """Add the new part of a piece. Drop a piece after a gap, because the reply contains it."""
        num_old_tokens = len(self._token_ids) - delta.token_offset
        num_old_chars = self._num_chars - delta.char_offset
        if num_old_tokens < 0 or num_old_chars < 0:
            return
        if num_old_tokens or num_old_chars:
            delta.token_ids = delta.token_ids[num_old_tokens:]
            delta.text = delta.text[num_old_chars:]
            delta.logprobs = delta.logprobs and delta.logprobs[num_old_tokens:]
            delta.token_offset, delta.char_offset = len(self._token_ids), self._num_chars
        if delta.token_ids or delta.text or delta.finish_reason:
            self._token_ids += delta.token_ids
            self._logprobs += delta.logprobs or []
            self._num_chars += len(delta.text)
            self._keep(delta)

    def _keep(self, delta: TextDelta) -> None:
        if not self._waiting:
            self._waiting.append(delta)
            return
        self.num_unread += _num_bytes(delta)
        last = self._waiting[-1]
        if last.logprobs and len(last.token_ids) >= MAX_PIECE:
            self._waiting.append(delta)
        else:
            _join(last, delta)

    def finish(self, reply: Final) -> None:
        """Set the reply, and add the output that the stream has missed."""
        if isinstance(reply, GenerateReply) and getattr(self.question, "stream", False):
            if reply.logprobs:
                pairs = zip(reply.logprobs, self._logprobs, strict=False)
                reply.logprobs[: len(self._logprobs)] = [said or heard for said, heard in pairs]
            if self._is_behind(reply):
                self.add(_as_delta(reply))
        self.final = reply

    @property
    def request_id(self) -> str:
        """Id of the answered request; empty for a question of another kind."""
        return getattr(self.question, "request_id", None) or ""

    def _is_behind(self, reply: GenerateReply) -> bool:
        return len(self._token_ids) < len(reply.token_ids) or self._num_chars < len(reply.text)


def _num_bytes(delta: TextDelta) -> int:
    num_logprobs = sum(len(token.candidates) for token in delta.logprobs or () if token)
    return len(delta.text) + 8 * len(delta.token_ids) + LOGPROB_BYTES * num_logprobs


def _join(first: TextDelta, then: TextDelta) -> None:
    """Add the next piece to a piece."""
    first.token_ids += then.token_ids
    first.text += then.text
    if then.logprobs:
        first.logprobs = first.logprobs or []
        first.logprobs += then.logprobs
    first.finish_reason, first.stop_reason = then.finish_reason, then.stop_reason
    first.reasoning_begin, first.reasoning_end = then.reasoning_begin, then.reasoning_end


def _as_delta(reply: GenerateReply) -> TextDelta:
    return TextDelta(
        request_id=reply.request_id,
        token_offset=0,
        char_offset=0,
        token_ids=reply.token_ids,
        text=reply.text,
        finish_reason=reply.finish_reason,
        logprobs=reply.logprobs,
        prompt_logprobs=reply.prompt_logprobs,
        prompt_tokens=reply.usage.prompt_tokens,
        cached_tokens=reply.usage.cached_tokens,
        starts_reasoning=reply.starts_reasoning,
        reasoning_begin=reply.reasoning_begin,
        reasoning_end=reply.reasoning_end,
    )


class Session:
    """The unanswered questions of one client.

    A frame with a number precedes each question; the gateway puts it before its answers.
    """

    def __init__(self, max_unread_bytes: float = math.inf) -> None:
        """Start without questions.

        max_unread_bytes: limit of a stream whose reader is blocked; beyond the limit, it is `cut`.
        """
        self.cut: list[PendingRequest] = []  # streams to be aborted
        self._max_unread = max_unread_bytes
        self._answers: dict[bytes, PendingRequest] = {}
        self._numbers = itertools.count(1)
        self._has_received = False  # a gateway has replied

    def ask(self, question: Request) -> PendingRequest:
        """Register a question, whose `frames` are to be sent. Raises msgspec's errors."""
        if isinstance(question, GenerateRequest) and question.request_id is None:
            question.request_id = uuid.uuid4().hex  # an id by which it can be sent again
        number = encode_number(next(self._numbers))
        pending = self._answers[number] = PendingRequest(number, question)
        return pending

    def unanswered(self) -> list[PendingRequest]:
        """Return the questions to send on a new connection, oldest first."""
        return list(self._answers.values())

    def aborts(self, request_id: str) -> list[AbortRequest]:
        """Return the requests that abort one request, or the open answers of several."""
        answers = self._answers.values()
        several = [pending.request_id for pending in answers if pending.prompt_id == request_id]
        return [AbortRequest(request_id=name) for name in several or [request_id]]

    def receive(self, frames: list[bytes]) -> None:
        number, frame = split_reply(frames)
        try:
            if number != BATCH:
                self._receive(number, MSGPACK.decode_reply(frame))
            else:
                batch = _decode_batch(frame)
                for asked, reply in zip(batch.numbers, batch.replies, strict=True):
                    self._receive(asked, reply)
        except DECODE_ERRORS as error:
            if self._has_received:
                log.warning("dropped undecodable reply: %s", error)
                return
            reply = ErrorReply(code="failed", message=f"{NO_GATEWAY} ({error})")
            for pending in self.unanswered():
                self._receive(pending.number, reply)
        else:
            self._has_received = True

    def _receive(self, number: bytes, reply: Reply) -> None:
        pending = self._answers.get(number)
        if pending is None:
            return  # a repeated reply
        if isinstance(reply, TextDelta):
            pending.add(reply)
            if not self._is_unread(pending):
                pending.on_change()
                return
            pending.cut()
            self.cut.append(pending)
        else:
            pending.finish(reply)
        del self._answers[number]
        pending.on_change()

    def _is_unread(self, pending: PendingRequest) -> bool:
        """Return whether a stream has too much output that its reader's client has not read."""
        share = max(1, len(self._answers) / FAIR_ANSWERS)
        if pending.num_unread * share <= self._max_unread:
            return False
        return time.monotonic() - pending.blocked_since >= PATIENCE


T = TypeVar("T")
_NUM_SEEDS = 2**64


def answer_requests(request: GenerateRequest) -> list[GenerateRequest]:
    """Return a request for each of the `n` answers to a prompt. Raises RequestError.

    Answer i has the id NAME-i and, with a seed, the seed + i. Only the first answer has
    `prompt_logprobs`, because computing them bypasses the prefix cache.
    """
    number = num_answers(request)
    name = request.request_id or uuid.uuid4().hex
    first = msgspec.structs.replace(request, n=1, request_id=f"{name}-0", num_answers=number)
    return [first, *(_further(first, f"{name}-{index}", index) for index in range(1, number))]


def ask_n(
    request: GenerateRequest, ask: Callable[[GenerateRequest], PendingRequest]
) -> list[PendingRequest]:
    """Send a request for each answer to a prompt with `ask`. Raises RequestError."""
    answers = [ask(question) for question in answer_requests(request)]
    for pending in answers:
        pending.prompt_id = request.request_id
    return answers


def num_answers(params: SamplingParams) -> int:
    """Return `n`. Raises RequestError if `n`, or the seed plus an index, is invalid."""
    given = {"n": params.n, "seed": params.seed}
    try:
        return msgspec.convert(given, SamplingParams).n
    except msgspec.ValidationError as error:
        field, message = explain(str(error), given, SamplingParams)
        raise RequestError(ErrorReply(code="invalid", message=message, field=field)) from None


def _further(first: GenerateRequest, request_id: str, index: int) -> GenerateRequest:
    return msgspec.structs.replace(
        first,
        request_id=request_id,
        seed=None if first.seed is None else _seed(first.seed + index),
        prompt_logprobs=None,
        num_answers=0,
    )


def _seed(number: int) -> int:
    """Return a seed, wrapped to a signed integer of 64 bits."""
    return (number + _NUM_SEEDS // 2) % _NUM_SEEDS - _NUM_SEEDS // 2


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; the first failure cancels the others."""
    works = [*work]
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
