"""What may be asked: OpenAI's requests, with vLLM's additions.

A field that is null is as one that is not there. Unknown fields are refused where a request would
be answered otherwise than its sender thinks; those known to change nothing are taken.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from penstock.protocol.sampling import NumLogprobs, Positive, SamplingParams, TokenId

MAX_N = 128


class StreamOptions(Struct, kw_only=True, frozen=True):
    """How to stream."""

    include_usage: bool = False
    """the last piece tells how many tokens there were"""


class JsonSchema(Struct, kw_only=True):
    """A schema and its name; the answer always follows it, `strict` or not."""

    name: str = ""
    schema: Any | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ApiRequest(SamplingParams, kw_only=True, forbid_unknown_fields=True):
    """What chats and completions have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N, description="answers per prompt")] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    guided_json: Any | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    """this and the following change nothing"""
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ContentPart(Struct, kw_only=True):
    """A part of a message; text is understood."""

    type: str
    text: str = ""


class FunctionCall(Struct, kw_only=True):
    """Which function an assistant called, and with what: JSON text, or the map itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, kw_only=True):
    """A call that an assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, kw_only=True):
    """One message. Clients send back what they got, so fields that are not known are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """the same; used where `reasoning_content` is missing"""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(Struct, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Meta(max_length=128)]
Conversation = Annotated[list[Message], Meta(min_length=1)]


class ChatRequest(ApiRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Conversation
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    max_completion_tokens: Positive | None = None
    """the new name of `max_tokens`"""
    tools: Tools = field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    """`none`: no thinking; the model knows no other grades"""


class CompletionRequest(ApiRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Positive | None = 16
    echo: bool = False
    best_of: int | None = None
    """what differs from `n` is refused"""
    suffix: str | None = None
    """refused"""


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    tools: Tools = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    """Qwen3 has none to add"""


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
