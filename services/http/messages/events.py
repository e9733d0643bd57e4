"""An answer as the events of Anthropic's Messages API, and as a whole message."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.protocol.nesting import is_too_deep
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.services.http.chat import ChatChoice
from penstock.services.http.errors import ApiError
from penstock.services.http.event_stream import NamedEvents
from penstock.services.http.messages.errors import MessagesError, messages_error
from penstock.services.http.messages.replies import (
    AnswerBlock,
    BlockContinued,
    BlockEnded,
    BlockPiece,
    BlockStarted,
    InputPiece,
    MessageEnd,
    MessageEnded,
    MessageEnding,
    MessageReply,
    MessageStarted,
    MessageStop,
    MessageUsage,
    SignaturePiece,
    TextPiece,
    ThinkingPiece,
)
from penstock.services.http.messages.schema import TextBlock, ThinkingBlock, ToolUseBlock
from penstock.services.http.messages.to_chat_request import INVALID_JSON
from penstock.services.http.replies import Delta
from penstock.services.http.schema import ChatRequest
from penstock.services.http.tool_grammar import ToolFormat

SIGNATURE = "unsigned"
"""of thinking blocks: clients want one, and send it back"""


class MessageEvents(NamedEvents):
    """Converter of one answer; a whole message is made of the same events."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, message_id: str, model: str, request: ChatRequest, form: ToolFormat) -> None:
        self._choice = ChatChoice(0, request, form)
        self._max_tokens = request.max_tokens or 0
        self._message = MessageReply(id=message_id, model=model)
        self._is_started = False
        self._index = -1
        self._open: str | int | None = None
        """type of the block that is open, or number of its call"""

    def events(
        self, new: TextDelta | GenerateReply | None, reply: GenerateReply | None
    ) -> Iterator[Struct]:
        """Yield the events of new text and calls, and, with the reply, the last ones."""
        if not self._is_started:
            self._is_started = True
            if isinstance(new, TextDelta):
                self._message.usage = _usage(new.prompt_tokens, new.cached_tokens)
            yield MessageStarted(message=self._message)
        for piece in self._choice.deltas(new, reply):
            yield from self._pieces(piece)
        if reply:
            yield from self._end_block()
            yield self._ending(reply)
            yield MessageEnded()

    def failed(self, error: ApiError) -> Iterable[MessagesError]:
        """Return the event of an error after the first event."""
        return [messages_error(error.status, str(error), error.body.error.code, error.too_long)]

    def whole(self, reply: GenerateReply) -> MessageReply:
        """Return the message that the events of a whole answer add up to."""
        message, blocks = self._message, self._message.content
        texts: list[str] = []
        for event in self.events(reply, reply):
            match event:
                case BlockStarted(content_block=block):
                    blocks.append(block)
                case BlockContinued(delta=TextPiece() | ThinkingPiece() | InputPiece() as piece):
                    texts += astuple(piece)
                case BlockEnded():
                    _fill(blocks[-1], "".join(texts))
                    texts.clear()
                case MessageEnding(delta=end, usage=usage):
                    message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
                    message.usage = usage
        return message

    def _pieces(self, delta: Delta) -> Iterator[Struct]:
        """Yield the events of one piece, which may end a block and begin another one."""
        if delta.reasoning:
            yield from self._begin_block("thinking", ThinkingBlock(thinking=""))
            yield self._piece(ThinkingPiece(delta.reasoning))
        if delta.content:
            yield from self._begin_block("text", TextBlock(text=""))
            yield self._piece(TextPiece(delta.content))
        for call in delta.tool_calls or ():
            if call.id:
                block = ToolUseBlock(id=call.id, name=call.function.name or "", input={})
                yield from self._begin_block(call.id, block)
            if call.function.arguments:
                yield self._piece(InputPiece(call.function.arguments))

    def _begin_block(self, name: str, block: AnswerBlock) -> Iterator[Struct]:
        if name != self._open:
            yield from self._end_block()
            self._open = name
            self._index += 1
            yield BlockStarted(self._index, block)

    def _piece(self, piece: BlockPiece) -> BlockContinued:
        return BlockContinued(self._index, piece)

    def _end_block(self) -> Iterator[Struct]:
        if self._open == "thinking":
            yield self._piece(SignaturePiece(SIGNATURE))
        if self._open:
            yield BlockEnded(self._index)
        self._open = None

    def _ending(self, reply: GenerateReply) -> MessageEnding:
        stop = reply.stop_reason if isinstance(reply.stop_reason, str) else None
        num_tokens = len(reply.token_ids)
        match self._choice.finish_reason(reply):
            case "tool_calls":
                reason: MessageStop = "tool_use"
                stop = None
            case "stop":
                reason = "stop_sequence" if stop else "end_turn"
            case "length" if num_tokens < self._max_tokens:
                reason = "model_context_window_exceeded"
            case "length":
                reason = "max_tokens"
            case _:
                reason = "pause_turn"  # aborted: the client may send it back to continue
        usage = _usage(reply.usage.prompt_tokens, reply.usage.cached_tokens, num_tokens)
        return MessageEnding(MessageEnd(reason, stop), usage)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int = 0) -> MessageUsage:
    return MessageUsage(
        input_tokens=prompt_tokens - cached_tokens,
        cache_read_input_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


def _fill(block: AnswerBlock, text: str) -> None:
    match block:
        case TextBlock():
            block.text = text
        case ThinkingBlock():
            block.thinking, block.signature = text, SIGNATURE
        case ToolUseBlock():
            block.input = _input(text)


def _input(text: str) -> dict[str, Any]:
    """Return a call's input; of text that is not an object, an object with the text."""
    try:
        decoded = msgspec.json.decode(text)
    except DECODE_ERRORS:
        decoded = None
    is_input = isinstance(decoded, dict) and not is_too_deep(decoded)
    return decoded if is_input else {INVALID_JSON: text}
