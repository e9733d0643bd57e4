"""Messages between clients and the gateway, in JSON or MessagePack.

The first byte shows the encoding: MessagePack maps begin at 0x80, JSON text below. The answer has
the encoding of the question. `{"prompt": "…"}` is a whole request: `type` may be left out.

A request is answered by any number of `TextDelta`s if it requests a stream, and then by exactly
one `GenerateReply` or `ErrorReply`.

The frames before a request precede every reply to the request. A client that sends a number in
front of its request gets each reply in one frame: the number, then the reply. libzmq ends a process
that loses its connection between two frames of one message, if the socket has ZMQ_IMMEDIATE, which
our clients need.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.messages.sampling import Pooling, Positive, SamplingParams, TokenId
from penstock.protocol.messages.status import RequestTimes, StatusReply


class Logprob(Struct, kw_only=True, gc=False):
    """One token that could stand at a position."""

    token_id: int
    # natural logarithm of its probability under the model's own logits: before temperature,
    # penalties, bias and restrictions
    logprob: float
    rank: int  # place among all tokens in the order of their logprobs; 1: the likeliest
    token: str  # text of the token; bytes that are not UTF-8 are shown as U+FFFD
    bytes: list[int]


class TokenLogprobs(Struct, kw_only=True, gc=False):
    """The token at a position, with the fields of `Logprob`, and the likeliest tokens there."""

    token_id: int
    logprob: float
    rank: int
    token: str
    bytes: list[int]
    top: list[Logprob]  # likeliest first; up to the requested number
    # index of the token's text in the output; None for a token of the prompt
    text_offset: int | None = None

    @property
    def candidates(self) -> "list[Logprob | TokenLogprobs]":
        """The token itself, then the likeliest tokens, which may include the token again."""
        return [self, *self.top]


FinishReason = Literal["stop", "length", "abort"]
StopReason = Annotated[
    str | int | None,
    Meta(description="which of `stop` or `stop_token_ids` ended the text; None: EOS, or no stop"),
]
NO_CONTROL = r"^(?!.*[\x00-\x1f\x7f])"  # matches text without control characters
RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern=NO_CONTROL)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31, description="lower is handled earlier")]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]


class ChatMessage(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message of a conversation, as the chat template sees it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str]  # the text, or the texts of several parts, which the template joins
    name: str | None = None
    reasoning_content: str | None = None  # reasoning of an assistant's message
    # calls of an assistant, as in OpenAI's API; `arguments` may be JSON or a map
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None  # id of the call that a tool's message answers

    def __post_init__(self) -> None:
        if self.role == "developer":
            self.role = "system"


PromptText = Annotated[str, Meta(min_length=1)] | Annotated[list[TokenId], Meta(min_length=1)]
Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class PromptFields(Struct, kw_only=True, omit_defaults=True):
    """A prompt, and options of its tokens. Exactly one of `prompt` and `messages` is given."""

    prompt: PromptText | None = None  # text, or token ids
    messages: Messages | None = None  # a conversation, put through the model's chat template
    # functions that the model may call, as in OpenAI's API; for the chat template
    tools: list[dict[str, Any]] | None = None
    # additional variables of the chat template, such as `enable_thinking`
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    # template that replaces the model's, if the pipeline runs with --trust-request-chat-template
    chat_template: str | None = None
    # end the prompt with the beginning of an assistant's message; the default, unless
    # `continue_final_message`
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False  # leave the last message open: generation continues it
    # add the tokenizer's special tokens; by default to `prompt`, not to `messages`
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Positive | None = None  # keep N tokens of a longer prompt
    # side at which tokens are cut off; left: the last N are kept
    truncation_side: Literal["left", "right"] = "left"


class GenerateRequest(SamplingParams, kw_only=True, tag="generate", forbid_unknown_fields=True):
    """A request for text, or with `pooling` for numbers, filled by the client.

    The struct repeats the fields of `PromptFields`, because it can't inherit from two structs.
    """

    prompt: PromptText | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Positive | None = None
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: CacheSalt | None = None  # share KV blocks with requests of the same salt only
    # name of the client, set by the pipeline's HTTP servers only; None: the connection's
    client: RequestId | None = None
    priority: Priority = 0
    # the client's own name for the request; None: the gateway makes a name
    request_id: RequestId | None = None
    # send the text as it arrives (DEALER sockets only: a REQ socket gets one reply)
    stream: bool = False
    # output tokens that the client has already: generation continues after them. The reply and a
    # stream include these tokens.
    output_token_ids: list[TokenId] = msgspec.field(default_factory=list)
    # return an embedding, or probabilities of labels, in place of text
    pooling: Pooling | None = None
    # seconds after which the request is aborted, and answered with its output until then
    timeout: Annotated[float, Meta(gt=0)] | None = None
    model: str | None = None  # name of one of several models; None: the first model
    # for metrics. A client that sends a request for each of n answers to a prompt sets n in the
    # first request, and 0 in the others.
    num_answers: Annotated[int, Meta(ge=0)] = 1


class TokenizePromptRequest(PromptFields, tag="tokenize", forbid_unknown_fields=True):
    """A request for the token ids of a prompt."""

    return_token_strs: bool = False
    client: RequestId | None = None
    model: str | None = None


class DetokenizeRequest(Struct, kw_only=True, tag="detokenize", forbid_unknown_fields=True):
    """A request for the text of token ids."""

    token_ids: list[TokenId]
    skip_special_tokens: bool = False  # leave special tokens out of the text
    client: RequestId | None = None
    model: str | None = None


class AbortRequest(Struct, kw_only=True, tag="abort", forbid_unknown_fields=True):
    """A request to end another request early. Unknown ids are ignored."""

    request_id: RequestId


class StatusRequest(Struct, kw_only=True, tag="status", forbid_unknown_fields=True):
    """A request for the pipeline's status."""

    wait: bool = False  # answer only when every stage is ready
    # answer with the scheduler's next report; without `fresh`, with its last, up to half a second
    # old. With `wait`: answer when every stage becomes ready, even if all stages are ready now.
    fresh: bool = False
    metrics: bool = False  # include `StatusReply.metrics` in the answer
    model: str | None = None  # with `wait`: the model to wait for; None: all models


class Usage(Struct, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    output_tokens: int


class GenerateReply(Struct, kw_only=True, tag="generated"):
    """The whole answer, filled by the gateway from its ledger."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: StopReason = None
    usage: Usage
    # the prompt ends within `<think>`: the text begins with reasoning, up to `</think>`
    starts_reasoning: bool = False
    # in a chat: index of the reasoning's first character in `text`; None: no reasoning
    reasoning_begin: int | None = None
    # index after the reasoning's last character, at the token `</think>`; None: the
    # reasoning has not ended
    reasoning_end: int | None = None
    times: RequestTimes | None = None  # None if no token was generated
    # an entry for each of `token_ids`, if requested; None for tokens that the client has sent
    logprobs: list[TokenLogprobs | None] | None = None
    # an entry for each prompt token, if requested; None for the first token
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # result of `pooling`: float32, little-endian (base64 in JSON); None if the request was aborted
    pooled: bytes | None = None

    @property
    def numbers(self) -> list[float]:
        """The result of `pooling` as numbers."""
        return array("f", self.pooled or b"").tolist()


class TextDelta(Struct, kw_only=True, tag="delta", omit_defaults=True):
    """New tokens and text of one request, made by a detokenizer.

    A token whose text is not known yet (half a character, perhaps half a stop string) comes
    without text; the text follows with a later token.
    """

    request_id: str
    token_offset: int  # index of the first of `token_ids` in the request's output
    char_offset: int  # index of the first character of `text` in the request's text
    token_ids: list[TokenId]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    logprobs: list[TokenLogprobs | None] | None = None  # for each of `token_ids`, if requested
    # in the request's first delta only; the reply repeats them
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    starts_reasoning: bool = False  # as in `GenerateReply`
    # as in `GenerateReply`, like `reasoning_end`: index in the request's text, once known
    reasoning_begin: int | None = None
    reasoning_end: int | None = None
    # as in `Usage`, like `cached_tokens`; clients get both in a stream's first delta only
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attempt: int = 0  # attempt of the request; not sent to clients, like `phase_seconds`
    # as in `StreamOpened`, in a stream's first delta only
    phase_seconds: tuple[float, float] = (0.0, 0.0)
    pooled: bytes | None = None  # as in `GenerateReply`, in the only delta


class ReplyBatch(Struct, tag="replies"):
    """Gateway → http: replies to several requests of one HTTP server, oldest first."""

    numbers: list[bytes]  # the frame that preceded each request
    replies: list["GenerateReply | TextDelta | ErrorReply"]


class TokenizeReply(Struct, kw_only=True, tag="tokenized"):
    """Reply to `TokenizePromptRequest`."""

    token_ids: list[int]
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeReply(Struct, kw_only=True, tag="detokenized"):
    """Reply to `DetokenizeRequest`."""

    text: str


class AbortReply(Struct, kw_only=True, tag="aborted"):
    """Reply to `AbortRequest`; `found`: whether there was a request to end."""

    request_id: str
    found: bool


class ErrorReply(Struct, kw_only=True, tag="error"):
    """Error of a request that was refused or has failed: the field, its value and the limit."""

    code: Literal["invalid", "overloaded", "failed"]
    message: str
    request_id: str | None = None
    field: str | None = None
    # for `overloaded`: seconds after which the client should retry
    retry_after: float | None = None
    # for a prompt that exceeds the context: number of its tokens, and the number that fit
    too_long: tuple[int, int] | None = None


Request = GenerateRequest | TokenizePromptRequest | DetokenizeRequest | AbortRequest | StatusRequest
Reply = (
    GenerateReply
    | TextDelta
    | TokenizeReply
    | DetokenizeReply
    | AbortReply
    | ErrorReply
    | StatusReply
)


NUMBER_BYTES = 9
_MARK = b"\x01"  # first byte of a number


class RequestKind(Struct):
    """The type of a request, decoded before the other fields."""

    type: Literal["generate", "tokenize", "detokenize", "abort", "status"] = "generate"


class RequestName(Struct):
    """The id of a request, decoded alone."""

    request_id: RequestId | None = None


REQUEST_TYPES: dict[str, type[Request]] = {
    struct.__struct_config__.tag: struct for struct in get_args(Request)
}


class Codec:
    """An encoding, with one decoder for each type."""

    def __init__(self, module: object) -> None:
        self.encode = module.Encoder().encode  # type: ignore[attr-defined]
        self.decode_reply = module.Decoder(Reply).decode  # type: ignore[attr-defined]
        self.decode_any = module.Decoder().decode  # type: ignore[attr-defined]
        self._decode_name = module.Decoder(RequestName).decode  # type: ignore[attr-defined]
        self._decode_kind = module.Decoder(RequestKind).decode  # type: ignore[attr-defined]
        self._decoders = {
            kind: module.Decoder(struct).decode  # type: ignore[attr-defined]
            for kind, struct in REQUEST_TYPES.items()
        }

    def decode_request(self, frame: bytes) -> Request:
        """Decode a request. Raises `msgspec.MsgspecError` or `UnicodeDecodeError`."""
        request: Request = self._decoders[self._decode_kind(frame).type](frame)
        return request

    def request_id(self, frame: bytes) -> str | None:
        """Return the id of a request that may be invalid; None without an id."""
        try:
            name: RequestName = self._decode_name(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return name.request_id


JSON = Codec(msgspec.json)
MSGPACK = Codec(msgspec.msgpack)


def codec_of(frame: bytes) -> Codec:
    """Return the encoding of a frame, by its first byte."""
    return MSGPACK if frame[:1] >= b"\x80" else JSON


def encode_number(number: int) -> bytes:
    """Return the envelope of a request: NUMBER_BYTES bytes."""
    return _MARK + number.to_bytes(NUMBER_BYTES - 1, "big")


BATCH = encode_number(0)  # in front of a `ReplyBatch`; requests have other numbers


def has_number(envelope: Sequence[bytes]) -> bool:
    """Return whether a single number follows the peer's identity."""
    return len(envelope) == 2 and len(envelope[1]) == NUMBER_BYTES and envelope[1][:1] == _MARK


def reply_frames(envelope: Sequence[bytes], reply: bytes) -> list[bytes]:
    """Return the frames of an encoded reply; the envelope begins with the peer's identity."""
    if has_number(envelope):
        return [envelope[0], envelope[1] + reply]
    return [*envelope, reply]


def split_reply(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the number and the encoded reply."""
    data = b"".join(frames)  # earlier gateways send two frames
    return data[:NUMBER_BYTES], data[NUMBER_BYTES:]
