"""Requests: OpenAI's, with the additions of vLLM and SGLang.

A field that is null counts as missing; for fields that are not here see `unknown_fields`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from penstock.protocol.messages.chat import Conversation
from penstock.protocol.messages.client import CacheSalt, Priority, RequestId
from penstock.protocol.messages.sampling import NumLogprobs, Positive, SamplingParams, TokenId


class StreamOptions(Struct, kw_only=True, frozen=True):
    """Token counts in a stream: in the last chunk, or so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """changes nothing with `include_usage: false`"""
    include_obfuscation: bool | None = None
    """changes nothing"""

    @property
    def has_usage_in_chunks(self) -> bool:
        return bool(self.continuous_usage_stats) and self.include_usage is not False


class JsonSchema(Struct, kw_only=True):
    """A named schema; the answer always follows it, `strict` or not."""

    name: str = ""
    schema: Any | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's field for JSON answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ApiRequest(SamplingParams, kw_only=True):
    """Fields of both chats and completions."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    response_format: ResponseFormat | None = None
    guided_json: Any | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # SGLang's name of `guided_regex`
    json_schema: Any | None = None  # SGLang's name of `guided_json`
    best_of: int | None = None  # values other than `n` are refused
    add_special_tokens: bool | None = None
    # keep N tokens of a longer prompt; -1: leave room for `max_tokens`
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: CacheSalt | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # logprobs name tokens `token_id:N`
    # part of the reply's `id`; default: the header X-Request-Id
    request_id: RequestId | None = None

    @property
    def has_tokens_in_chunks(self) -> bool:
        """True if chunks of a stream have ids or counts of their tokens."""
        options = self.stream_options
        return self.return_token_ids or (options is not None and options.has_usage_in_chunks)


ToolName = Annotated[str, Meta(min_length=1, max_length=128)]


class Function(Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call; `parameters`: the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class AllowedToolSet(Struct, kw_only=True):
    """Tools that the model may call (`auto`), or of which it must call one (`required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=128)]


class AllowedTools(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """A subset of the request's tools."""

    allowed_tools: AllowedToolSet


Tools = Annotated[list[Tool], Meta(max_length=128)]


class ChatRequest(ApiRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Conversation
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    max_completion_tokens: Positive | None = None  # the new name of `max_tokens`
    tools: Tools = field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # Jinja template that replaces the model's; needs `--trust-request-chat-template`
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False  # the answer continues the last message
    include_reasoning: bool = True
    reasoning_effort: str | None = None  # `none`: no thinking; other values change nothing


class CompletionRequest(ApiRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    # 0, with `echo`: return the prompt only
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = 16
    echo: bool = False
    suffix: str | None = None  # refused


class TokenizeBody(Struct, kw_only=True):
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


class DetokenizeBody(Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
