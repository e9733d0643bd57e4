"""Responses and their items: OpenAI's."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from penstock.services.http.responses.schema import (
    AllowedFunctions,
    FunctionTool,
    NamedFunction,
    NamespaceTool,
    Reasoning,
    TextFormat,
    TextOptions,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str = ""


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant, with one part."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = field(default_factory=list)


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning, in one part and without summaries."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class FunctionCallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; `arguments`: JSON text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class ResponseUsage(Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseError(Struct, kw_only=True):
    """The reason of a failed response."""

    code: str
    message: str


class TextUsed(TextOptions, kw_only=True, omit_defaults=False):
    """The request's options of the text."""

    format: TextFormat = field(default_factory=lambda: TextFormat(type="text"))
    verbosity: Literal["low", "medium", "high"] = "medium"


class ResponseReply(Struct, kw_only=True):
    """Reply to ResponsesRequest: the answer, and the request's parameters."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: dict[Literal["reason"], str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextUsed
    tool_choice: str | NamedFunction | AllowedFunctions
    tools: list[FunctionTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: str = "default"
    metadata: dict[str, str]


class InputItems(Struct, kw_only=True):
    """A part of a response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct, kw_only=True):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Struct, kw_only=True):
    """Reply to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
