"""An answer as the events of Anthropic's Messages API, and as a whole message."""

from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.protocol.decoding import is_too_deep
from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.services.http.generation.chat import ChatChoice
from penstock.services.http.generation.generation import Events
from penstock.services.http.generation.replies import Delta
from penstock.services.http.generation.schema import ChatRequest
from penstock.services.http.messages.schema import (
    AnswerBlock,
    MessageReply,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from penstock.services.http.messages.to_chat_request import INVALID_JSON
from penstock.services.http.shared.errors import ApiError, messages_error
from penstock.services.http.shared.tool_format import ToolFormat

Event = dict[str, Any]
SIGNATURE = "unsigned"  # of thinking blocks: clients want one, and send it back


class MessageEvents(Events):
    """Converter of one answer, which fills a message; a whole answer takes the same way."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(
        self,
        message_id: str,
        model: str,
        request: ChatRequest,
        form: ToolFormat,
        cached_block: int = 0,
    ) -> None:
        """cached_block: tokens of a block of the prefix cache; 0 without one."""
        self._cached_block = cached_block
        self._choice = ChatChoice(0, request, form)
        self._max_tokens = request.max_tokens or 0
        self._message = MessageReply(id=message_id, model=model)
        self._is_started = False
        self._block: AnswerBlock | None = None  # the last one of the message, while it is open
        self._texts: list[str] = []  # of the open block

    def events(
        self, new: TextDelta | GenerateReply | None, reply: GenerateReply | None
    ) -> Iterator[Event]:
        """Yield the events of new text and calls, and, with the reply, the last ones."""
        if not self._is_started:
            self._is_started = True
            if isinstance(new, TextDelta):
                self._message.usage = self._usage(new.prompt_tokens, new.cached_tokens)
            elif reply:  # with `max_tokens: 0`, no output comes before it
                usage = reply.usage
                self._message.usage = self._usage(usage.prompt_tokens, usage.cached_tokens)
            yield {"type": "message_start", "message": self._message}
        for piece in self._choice.deltas(new, reply):
            yield from self._pieces(piece)
        if reply:
            yield from self._end_block()
            yield self._end(reply)
            yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> list[Event]:
        """Return the event of an error after the first event."""
        return [messages_error(error.status, str(error), error.body.error.code, error.too_long)]

    def whole(self, reply: GenerateReply) -> MessageReply:
        """Return the message that the events of a whole answer add up to."""
        for _ in self.events(reply, reply):
            pass
        return self._message

    def _pieces(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of one piece, which may end a block and begin another one."""
        if delta.reasoning:
            if not isinstance(self._block, ThinkingBlock):
                yield from self._begin_block(ThinkingBlock(thinking=""))
            yield self._piece("thinking_delta", "thinking", delta.reasoning)
        if delta.content:
            if not isinstance(self._block, TextBlock):
                yield from self._begin_block(TextBlock(text=""))
            yield self._piece("text_delta", "text", delta.content)
        for call in delta.tool_calls or ():
            if call.id:
                name = call.function.name or ""
                yield from self._begin_block(ToolUseBlock(id=call.id, name=name, input={}))
            if call.function.arguments:
                yield self._piece("input_json_delta", "partial_json", call.function.arguments)

    def _begin_block(self, block: AnswerBlock) -> Iterator[Event]:
        yield from self._end_block()
        self._message.content.append(block)
        self._block, self._texts = block, []
        yield self._of_block("content_block_start", content_block=block)

    def _piece(self, kind: str, field: str, text: str) -> Event:
        self._texts.append(text)
        return self._of_block("content_block_delta", delta={"type": kind, field: text})

    def _of_block(self, name: str, **fields: Any) -> Event:
        """Return an event about the last block."""
        return {"type": name, "index": len(self._message.content) - 1, **fields}

    def _end_block(self) -> Iterator[Event]:
        block, text = self._block, "".join(self._texts)
        match block:
            case None:
                return
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking, block.signature = text, SIGNATURE
                signature = {"type": "signature_delta", "signature": SIGNATURE}
                yield self._of_block("content_block_delta", delta=signature)
            case ToolUseBlock():
                block.input = _input(text)
        self._block = None
        yield self._of_block("content_block_stop")

    def _end(self, reply: GenerateReply) -> Event:
        """Return the event before the last one, and complete the message."""
        message, num_tokens = self._message, len(reply.token_ids)
        stop = reply.stop_reason if isinstance(reply.stop_reason, str) else None
        match self._choice.finish_reason(reply):
            case "tool_calls":
                message.stop_reason = "tool_use"
            case "stop" if stop:
                message.stop_reason, message.stop_sequence = "stop_sequence", stop
            case "stop":
                message.stop_reason = "end_turn"
            case "length" if num_tokens < self._max_tokens:
                message.stop_reason = "model_context_window_exceeded"
            case "length":
                message.stop_reason = "max_tokens"
            case _:  # aborted: the client may send it back to continue
                message.stop_reason = "pause_turn"
        usage = reply.usage
        message.usage = self._usage(usage.prompt_tokens, usage.cached_tokens, num_tokens)
        end = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        return {"type": "message_delta", "delta": end, "usage": message.usage}

    def _usage(
        self, prompt_tokens: int, cached_tokens: int, output_tokens: int = 0
    ) -> MessageUsage:
        """Return the counts: an equal prompt would read what this one reads and creates."""
        size, created = self._cached_block, 0
        if size:
            created = max(0, (prompt_tokens - 1) // size * size - cached_tokens)
        return MessageUsage(
            input_tokens=prompt_tokens - cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached_tokens,
            output_tokens=output_tokens,
        )


def _input(text: str) -> dict[str, Any]:
    """Return a call's input; of text that is not an object, an object with the text."""
    try:
        decoded = msgspec.json.decode(text)
    except DECODE_ERRORS:
        decoded = None
    is_input = isinstance(decoded, dict) and not is_too_deep(decoded)
    return decoded if is_input else {INVALID_JSON: text}
