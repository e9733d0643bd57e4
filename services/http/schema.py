"""Requests: OpenAI's, with the additions of vLLM and SGLang.

A field that is null is as one that is not there. `neutral_fields.py` has the fields that are
accepted with values that change nothing; all others are refused.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from penstock.protocol.messages.client import CacheSalt, Priority, RequestId
from penstock.protocol.messages.sampling import NumLogprobs, Positive, SamplingParams, TokenId

MAX_N = 128


class StreamOptions(Struct, kw_only=True, frozen=True):
    """How to stream."""

    include_usage: bool = False
    """the last chunk has the numbers of tokens"""
    continuous_usage_stats: bool = False
    """every chunk has the numbers of tokens so far"""


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
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    response_format: ResponseFormat | None = None
    guided_json: Any | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    """SGLang's names: of `guided_regex`, and of `guided_json`:"""
    json_schema: Any | None = None
    best_of: int | None = None
    """what differs from `n` is refused"""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    """keep N tokens of a longer prompt; -1: as many as leave room for `max_tokens`"""
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: CacheSalt | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """logprobs name tokens `token_id:N`"""
    request_id: RequestId | None = None
    """part of the reply's `id`; the header X-Request-Id is used where it is missing"""
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


class NamedTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class AllowedToolSet(Struct, kw_only=True):
    """Tools of which the model may call one (`auto`) or must (`required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=128)]


class AllowedTools(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """A choice of the request's tools."""

    allowed_tools: AllowedToolSet


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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """a Jinja template in place of the model's; needs `--trust-request-chat-template`"""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    """the answer continues the last message"""
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    """`none`: no thinking; the model knows no other grades"""


class CompletionRequest(ApiRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = 16
    """0, with `echo`: nothing but the prompt"""
    echo: bool = False
    suffix: str | None = None
    """refused"""


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    return_token_strs: bool = False
    tools: Tools = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
