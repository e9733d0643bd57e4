"""What a client and the gateway say to each other, in JSON or MessagePack.

The first byte tells which: MessagePack maps begin at 0x80, JSON text below. The answer comes in
the encoding of the question. `{"prompt": "…"}` is a whole request: `type` may be left out.
Frames that a client puts before its question come back before every answer to it.

A request is answered by any number of `TextDelta`s if it asked for a stream, and then by exactly
one `GenerateReply` or `ErrorReply`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.sampling import SamplingParams, TokenId

FinishReason = Literal["stop", "length", "abort"]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]


class ChatMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class GenerateRequest(SamplingParams, kw_only=True, tag="generate", forbid_unknown_fields=True):
    """Asks for text. Filled by the client; exactly one of `prompt` and `messages`."""

    prompt: (
        Annotated[str, Meta(min_length=1)] | Annotated[list[TokenId], Meta(min_length=1)] | None
    ) = None
    """text, or token ids"""
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    """a conversation, put through the model's chat template"""
    request_id: RequestId | None = None
    """the client's own name for the request; None: the gateway makes one"""
    stream: bool = False
    """send the text as it comes (DEALER sockets only: a REQ socket gets one reply)"""
    output_token_ids: list[TokenId] = msgspec.field(default_factory=list)
    """what the client has of the answer already: generation goes on behind it. The reply and a
    stream have all of it"""
    timeout: Annotated[float, Meta(gt=0)] | None = None
    """seconds after which the request is aborted: it is answered with what it has by then"""


class AbortRequest(Struct, kw_only=True, tag="abort", forbid_unknown_fields=True):
    """Ends a request early. Doing it twice, or for an unknown id, does nothing."""

    request_id: RequestId


class StatusRequest(Struct, kw_only=True, tag="status", forbid_unknown_fields=True):
    """Asks how the pipeline is."""

    wait: bool = False
    """answer only when every stage is there"""
    fresh: bool = False
    """answer with the scheduler's next report; without, with its last, up to half a second old.
    With `wait`: when every stage is there the next time, not if it is now"""


class Usage(Struct, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    """prompt tokens whose KV came from the prefix cache"""
    output_tokens: int


class GenerateReply(Struct, kw_only=True, tag="generated"):
    """The whole answer, filled by the gateway from its ledger."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage


class TextDelta(Struct, kw_only=True, tag="delta", omit_defaults=True):
    """New tokens and text of one request, made by a detokenizer.

    A token whose text is not known yet (half a character, perhaps half a stop string) comes
    without text; the text follows with a later token.
    """

    request_id: str
    token_offset: int
    """index of the first of `token_ids` in the request's output"""
    char_offset: int
    """index of the first character of `text` in the request's text"""
    token_ids: list[TokenId]
    text: str
    finish_reason: FinishReason | None = None
    attempt: int = 0
    """which submission of the request this answers; the client does not see it, nor these:"""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class AbortReply(Struct, kw_only=True, tag="aborted"):
    """Answers `AbortRequest`; `found` tells whether there was something to end."""

    request_id: str
    found: bool


class ErrorReply(Struct, kw_only=True, tag="error"):
    """A request that was refused or failed, and why: the field, its value and the limit."""

    code: Literal["invalid", "overloaded", "failed"]
    message: str
    request_id: str | None = None
    field: str | None = None
    retry_after: float | None = None
    """of `overloaded`: seconds after which it may go better"""


class SchedulerStatus(Struct, kw_only=True, tag="scheduler_status"):
    """The scheduler's state, sent to the gateway when it starts, on change, and as heartbeat."""

    epoch: int
    """nanoseconds since 1970 at which this scheduler started; a later one is larger"""
    ready: bool
    """all workers are in place and so is a detokenizer"""
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    gpu_idle_us: tuple[float, float] = (0.0, 0.0)
    """median and 99th percentile of the GPU's wait between two steps; 0 on CPUs"""
    num_bad_frames: int = 0
    workers: list[str] = []
    detokenizers: dict[str, int] = {}
    """name → requests it has"""


class StatusReply(Struct, kw_only=True, tag="status_reply"):
    """The pipeline as the gateway sees it."""

    ready: bool
    model: str
    num_requests: int
    """requests in the ledger: accepted and not yet answered"""
    tokenizers: dict[str, int]
    """name → requests it has"""
    scheduler: SchedulerStatus | None
    num_bad_frames: int


Request = GenerateRequest | AbortRequest | StatusRequest
Reply = GenerateReply | TextDelta | AbortReply | ErrorReply | StatusReply


class _Kind(Struct):
    type: Literal["generate", "abort", "status"] = "generate"


_REQUEST_TYPES: dict[str, type[Request]] = {
    "generate": GenerateRequest,
    "abort": AbortRequest,
    "status": StatusRequest,
}


class Codec:
    """One encoding, with a decoder per type made once."""

    def __init__(self, module: object) -> None:
        self.encode = module.Encoder().encode  # type: ignore[attr-defined]
        self.decode_reply = module.Decoder(Reply).decode  # type: ignore[attr-defined]
        self.decode_any = module.Decoder().decode  # type: ignore[attr-defined]
        self._decode_kind = module.Decoder(_Kind).decode  # type: ignore[attr-defined]
        self._decoders = {
            kind: module.Decoder(struct).decode  # type: ignore[attr-defined]
            for kind, struct in _REQUEST_TYPES.items()
        }

    def decode_request(self, frame: bytes) -> Request:
        """Raises `msgspec.MsgspecError` or `UnicodeDecodeError` for anything else."""
        request: Request = self._decoders[self._decode_kind(frame).type](frame)
        return request


JSON = Codec(msgspec.json)
MSGPACK = Codec(msgspec.msgpack)


def codec_of(frame: bytes) -> Codec:
    """The encoding of a frame, by its first byte."""
    return MSGPACK if frame[:1] >= b"\x80" else JSON
