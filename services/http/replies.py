"""What is answered: OpenAI's replies, with vLLM's additions."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from penstock.protocol.messages.client import StopReason

ENCODER = msgspec.json.Encoder()


def json_response(body: object, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(ENCODER.encode(body), status, media_type="application/json")


class ErrorDetail(Struct, kw_only=True):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    """the field that is wrong"""
    code: str | None


class ErrorBody(Struct, kw_only=True):
    """Every error."""

    error: ErrorDetail


class PromptTokensDetails(Struct, kw_only=True):
    """Where the prompt's keys and values came from."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """How many tokens a request had; a prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class TopLogprob(Struct, kw_only=True):
    """A token that could stand at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob, kw_only=True):
    """The token that stands there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Of a chat."""

    content: list[ChatLogprob]


class CompletionLogprobs(Struct, kw_only=True):
    """Of a completion: one entry of each list for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, kw_only=True):
    """vLLM's: of one token of the prompt; `rank` is known among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Struct, kw_only=True, omit_defaults=True):
    """A function's name and the JSON text of its arguments, or a piece of it."""

    name: str | None = None
    arguments: str


class CalledTool(Struct, kw_only=True, omit_defaults=True):
    """A call, or in a stream a piece of one, with the number of the call."""

    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class ReplyMessage(Struct, kw_only=True):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | UnsetType = UNSET
    """vLLM's name; `reasoning_content`, which SGLang and DeepSeek use, has the same text"""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoiceReply(Struct, kw_only=True):
    """One answer of `n`."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: StopReason
    """vLLM's: which of `stop` or `stop_token_ids` ended it"""
    token_ids: list[int] | UnsetType = UNSET


class ReplyHead(Struct, kw_only=True):
    """The beginning of every reply and chunk."""

    id: str
    object: str
    created: int
    model: str


class ChatReply(ReplyHead, kw_only=True):
    """Reply to ChatRequest."""

    choices: list[ChatChoiceReply]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class StreamChunk(ReplyHead, kw_only=True):
    """One event of a stream."""

    choices: list[Any] = []
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, kw_only=True, omit_defaults=True):
    """What a message grows by."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChunk(Struct, kw_only=True):
    """One choice of a piece of a stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoiceReply(Struct, kw_only=True):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionReply(ReplyHead, kw_only=True):
    """Reply to CompletionRequest."""

    choices: list[CompletionChoiceReply]
    usage: Usage


class Model(Struct, kw_only=True):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """All models: the one."""

    object: Literal["list"]
    data: list[Model]


class TokenizeResult(Struct, kw_only=True):
    """Answers TokenizeBody."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResult(Struct, kw_only=True):
    """Answers DetokenizeBody."""

    prompt: str


class Health(Struct, kw_only=True):
    """Whether the pipeline works."""

    status: Literal["ok"]


class Version(Struct, kw_only=True):
    """Of Penstock."""

    version: str
