"""Replies: OpenAI's, with vLLM's additions.

Fields that are always null are of things that Penstock does not do. Clients of vLLM read them.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.protocol.messages.client import StopReason

TokenIds = list[int] | UnsetType


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


class ChatLogprob(TopLogprob, kw_only=True):
    """The token at a position, and the likeliest ones."""

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
    """vLLM's logprob of one prompt token; the rank of the likeliest one is 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Struct, kw_only=True, omit_defaults=True):
    """A function's name and the JSON text of its arguments, or a piece of it."""

    name: str | None = None
    arguments: str


class CalledTool(Struct, kw_only=True, omit_defaults=True):
    """A tool call; in a stream, a piece of one with the number of the call."""

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
