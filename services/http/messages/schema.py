"""Requests and replies of Anthropic's Messages API.

For fields that are not here see `unknown_fields`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from penstock.protocol.messages.sampling import Stop, Temperature, TopK, TopP
from penstock.services.http.generation.schema import ToolName


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of the assistant."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning, which only Anthropic can read; it is ignored."""


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class UserTurn(Struct, kw_only=True, tag_field="role", tag="user"):
    """A message of the user, or results of calls."""

    content: str | list[TextBlock | ToolResultBlock]


AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class AssistantTurn(Struct, kw_only=True, tag_field="role", tag="assistant"):
    """An answer; as the last message, the beginning of an answer that is to be continued."""

    content: str | list[AssistantBlock]


class SystemTurn(Struct, kw_only=True, tag_field="role", tag="system"):
    """Instructions within a conversation."""

    content: str | list[TextBlock]


class MessagesTool(Struct, kw_only=True):
    """A tool that the client executes, or one of Anthropic's, which is left out.

    `input_schema`: the JSON schema of its input.
    """

    name: ToolName | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolUseChoice(Struct, kw_only=True):
    """Calls that the model may make (`auto`), or must make (`any`, `tool`)."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the tool, with `tool`
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Struct, kw_only=True):
    """Reasoning before the answer, where the chat template has a switch for it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    # changes nothing: `max_tokens` limits reasoning and answer together
    budget_tokens: int | None = None


class JsonOutputFormat(Struct, kw_only=True):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """Form of the answer."""

    format: JsonOutputFormat | None = None
    effort: str | None = None  # changes nothing


class CountTokensRequest(Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    system: str | list[TextBlock] = ""
    tools: list[MessagesTool] = field(default_factory=list)
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None  # default: disabled
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] = field(default_factory=list)
    stream: bool = False
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None  # the older name of `output_config.format`
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] = field(default_factory=list)
    # conversations that the server keeps: refused, so the client sends the whole conversation
    thread: Any = None
    context_management: Any = None  # changes nothing


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    # most tokens of reasoning and answer; 0 only fills the prefix cache
    max_tokens: Annotated[int, Meta(ge=0)]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
MessageStop = (
    Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    | Literal["model_context_window_exceeded", "pause_turn"]
)


class MessageUsage(Struct, kw_only=True):
    """Token counts; the prompt is the sum of the first three, as in Anthropic's API.

    `cache_creation_input_tokens` are those that are now in the prefix cache and were not before.
    """

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
