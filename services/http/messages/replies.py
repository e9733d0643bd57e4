"""Replies of Anthropic's Messages API."""

from typing import Literal

from msgspec import Struct, field

from penstock.services.http.messages.schema import TextBlock, ThinkingBlock, ToolUseBlock

AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
MessageStop = (
    Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    | Literal["model_context_window_exceeded", "pause_turn"]
)


class MessageUsage(Struct, kw_only=True):
    """Token counts. The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class MessageReply(Struct, kw_only=True, tag_field="type", tag="message"):
    """Reply to MessagesRequest."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = field(default_factory=list)
    stop_reason: MessageStop | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = field(default_factory=MessageUsage)


class TokenCount(Struct, kw_only=True):
    """Reply to CountTokensRequest."""

    input_tokens: int
