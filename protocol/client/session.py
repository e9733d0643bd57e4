"""The unanswered questions of a client, without sockets.

A restarted gateway may repeat or omit deltas. So every question is kept until it is answered, to be
sent again. Of each `TextDelta` only the new part is passed on, and the reply fills in what is
missing at the end. The pieces of a stream always add up to the text of its reply.
"""

import itertools
import logging
import uuid
from collections.abc import Callable

import msgspec

from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.client import (
    AbortReply,
    DetokenizeReply,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    Reply,
    ReplyBatch,
    Request,
    TextDelta,
    TokenizeReply,
)
from penstock.protocol.messages.codec import MSGPACK
from penstock.protocol.messages.logprobs import TokenLogprobs
from penstock.protocol.messages.status import StatusReply
from penstock.protocol.transport.channel import DECODE_ERRORS

log = logging.getLogger(__name__)
_decode_batch = msgspec.msgpack.Decoder(ReplyBatch).decode
Done = GenerateReply | TokenizeReply | DetokenizeReply | AbortReply | StatusReply
Final = Done | ErrorReply


class Answer:
    """One question, and the replies to it."""

    def __init__(self, number: bytes, question: Request) -> None:
        self.question = question
        self.number = number
        self._frame = MSGPACK.encode(question)
        self.final: Final | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._waiting: TextDelta | None = None
        """what has arrived and is not taken, as one piece"""
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
        """Return what has arrived of the stream since the last call, as one piece."""
        delta, self._waiting = self._waiting, None
        return delta

    def result(self) -> Done:
        """Return the reply, once `final` is set. Raises RequestError if it is an error."""
        assert self.final is not None  # noqa: S101
        if isinstance(self.final, ErrorReply):
            raise RequestError(self.final)
        return self.final

    def add(self, delta: TextDelta) -> None:
        """Add the new part of a piece; a piece after a gap is dropped: the reply has it."""
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
            self._waiting = _joined(self._waiting, delta) if self._waiting else delta

    def finish(self, reply: Final) -> None:
        """Set the reply, and add what the stream has missed."""
        if isinstance(reply, GenerateReply) and self._is_stream:
            if reply.logprobs:
                pairs = zip(reply.logprobs, self._logprobs, strict=False)
                reply.logprobs[: len(self._logprobs)] = [said or heard for said, heard in pairs]
            if self._is_behind(reply):
                self.add(_as_delta(reply))
        self.final = reply

    @property
    def request_id(self) -> str:
        """Id of the request that this answers; empty for a question of another kind."""
        return getattr(self.question, "request_id", None) or ""

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.question, GenerateRequest) and self.question.stream

    def _is_behind(self, reply: GenerateReply) -> bool:
        return len(self._token_ids) < len(reply.token_ids) or self._num_chars < len(reply.text)


def _joined(first: TextDelta, then: TextDelta) -> TextDelta:
    """Return two consecutive pieces as one, which is the first one changed."""
    first.token_ids += then.token_ids
    first.text += then.text
    if then.logprobs:
        first.logprobs = (first.logprobs or []) + then.logprobs
    first.finish_reason, first.stop_reason = then.finish_reason, then.stop_reason
    return first


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
        cached_tokens=reply.usage.cached_tokens,
        starts_reasoning=reply.starts_reasoning,
    )


class Session:
    """The unanswered questions of one client.

    A frame with a number precedes each question; the gateway puts it before its answers.
    """

    def __init__(self) -> None:
        self._answers: dict[bytes, Answer] = {}
        self._numbers = itertools.count()

    def ask(self, question: Request) -> Answer:
        """Register a question, whose `frames` are to be sent. Raises msgspec's errors."""
        if isinstance(question, GenerateRequest) and question.request_id is None:
            question.request_id = uuid.uuid4().hex  # an id by which it can be sent again
        number = b"%d" % next(self._numbers)
        answer = self._answers[number] = Answer(number, question)
        return answer

    def unanswered(self) -> list[Answer]:
        """Return the questions to send on a new connection, oldest first."""
        return list(self._answers.values())

    def receive(self, frames: list[bytes]) -> None:
        number, frame = frames[0], frames[-1]
        try:
            if number:
                self._receive(number, MSGPACK.decode_reply(frame))
            else:
                batch = _decode_batch(frame)
                for one, reply in zip(batch.numbers, batch.replies, strict=True):
                    self._receive(one, reply)
        except DECODE_ERRORS as error:
            log.warning("dropped undecodable reply: %s", error)

    def _receive(self, number: bytes, reply: Reply) -> None:
        answer = self._answers.get(number)
        if answer is None:
            return  # a repeated reply
        if isinstance(reply, TextDelta):
            answer.add(reply)
        else:
            answer.finish(reply)
            del self._answers[number]
        answer.on_change()
