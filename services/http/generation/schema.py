"""Requests and replies of OpenAI's API, with vLLM's additions.

Fields that are always null belong to features that Penstock does not have; clients of vLLM read
these fields.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from penstock.protocol.messages.chat import Conversation
from penstock.protocol.messages.client import CacheSalt, Priority, RequestId, StopReason
from penstock.protocol.messages.sampling import (
    NumLogprobs,
    Positive,
    SamplingParams,
    TokenId,
)

ToolName = Annotated[str, Meta(min_length=1, max_length=128)]
TokenIds = list[int] | UnsetType


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
    # `none`: no thinking; other values are the template's variable of this name
    reasoning_effort: str | None = None


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
    reasoning_effort: str | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class Usage(Struct, kw_only=True):
    """Token counts of a request; a prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int] | UnsetType = UNSET


class TopLogprob(Struct, kw_only=True):
    """A token that was possible at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct, kw_only=True):
    """The token at a position, and the likeliest tokens there."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Logprobs of a chat's answer."""

    content: list[ChatLogprob]


class CompletionLogprobs(Struct, kw_only=True):
    """Logprobs of a completion: each list has one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, kw_only=True):
    """vLLM's logprob of one prompt token; the likeliest token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Struct, kw_only=True, omit_defaults=True):
    """A function's name and the JSON text of its arguments, or a piece of this text."""

    name: str | None = None
    arguments: str


class CalledTool(Struct, kw_only=True, omit_defaults=True):
    """A tool call; in a stream, a piece of a call with the call's index."""

    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class ReplyMessage(Struct, kw_only=True):
    """The assistant's message. `reasoning` (vLLM's name) and `reasoning_content` are the same."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoiceReply(Struct, kw_only=True):
    """One of `n` answers; `stop_reason`, as in vLLM, is the stop string or token id."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: StopReason
    token_ids: list[int] | None = None
    routed_experts: None = None


class ReplyHead(Struct, kw_only=True):
    """The beginning of every reply and chunk."""

    id: str
    object: str
    created: int
    model: str


class WholeReply(ReplyHead, kw_only=True):
    """Fields of a reply in one piece."""

    usage: Usage
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class ChatReply(WholeReply, kw_only=True):
    """Reply to ChatRequest."""

    choices: list[ChatChoiceReply]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None


class StreamChunk(ReplyHead, kw_only=True):
    """One event of a stream."""

    choices: list[Any] = []
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET


class Delta(Struct, kw_only=True, omit_defaults=True):
    """The next piece of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChunk(Struct, kw_only=True):
    """One choice of a chat's StreamChunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds = UNSET


class CompletionChunk(Struct, kw_only=True):
    """One choice of a completion's StreamChunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class CompletionChoiceReply(Struct, kw_only=True):
    """One of `n` answers to a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: None = None


class CompletionReply(WholeReply, kw_only=True):
    """Reply to CompletionRequest."""

    choices: list[CompletionChoiceReply]


class Model(Struct, kw_only=True):
    """A served model, by one of its names."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str  # folder of the checkpoint, in which clients of vLLM look for the tokenizer
    parent: None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """A list of the served models."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResult(Struct, kw_only=True):
    """Reply to TokenizeBody."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET
