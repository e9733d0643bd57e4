"""Messages on the path of a request: gateway, tokenizer, scheduler, detokenizer, gateway.

Tokenizers register with the gateway, detokenizers with the schedulers.
"""

import logging
from typing import ClassVar

from msgspec import Raw, Struct

from penstock.protocol.messages.client import (
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    FinishReason,
    PromptFields,
    TextDelta,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.packed import PackedLists, PackedLogprobs
from penstock.protocol.messages.sampling import Pooling, SamplingParams, TokenId
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.structured import Reasoning
from penstock.protocol.messages.supervisor import SupervisorReport

log = logging.getLogger(__name__)
PROTOCOL_VERSION = 18  # version of this folder's messages; registrations contain the version


class Heartbeat(Struct, tag=True):
    """Tokenizer → gateway, detokenizer → scheduler: the sender is alive. The first registers it."""

    name: str
    version: int = PROTOCOL_VERSION


class Refused(Struct, tag=True):
    """Reply to a tokenizer or detokenizer of another protocol version, which then exits."""

    reason: str


class Goodbye(Struct, tag=True):
    """Announcement of a tokenizer or detokenizer that stops: its work moves to another process."""


def refusal(name: str, version: int) -> str | None:
    """Return and log the reason to refuse a process that registers; None: it is accepted."""
    if version == PROTOCOL_VERSION:
        return None
    reason = (
        f"{name} speaks version {version} of the protocol; "
        f"this pipeline speaks version {PROTOCOL_VERSION}"
    )
    log.warning("refused: %s", reason)
    return reason


class TokenizedRequest(Struct, PackedLists, tag=True):
    """Tokenizer → scheduler: a request in token ids.

    The gateway fills all fields except `prompt_token_ids`, `reasoning` and `bad_words`.
    """

    item_bytes: ClassVar = {"prompt_token_ids": 4, "output_token_ids": 4}

    request_id: str
    attempt: int
    sampling: SamplingParams  # every default filled in
    prompt_token_ids: bytes = b""  # int32 [num_prompt_tokens]
    output_token_ids: bytes = b""  # int32, generated and delivered by an earlier attempt
    # deaths of another replica's workers at which the request was in flight, since its last token
    num_deaths: int = 0
    cache_salt: str = ""  # only requests with the same salt share KV blocks
    client: str = ""  # name of the client: clients take turns
    priority: int = 0
    reasoning: Reasoning = "none"
    bad_words: list[list[TokenId]] = []  # bad words of `sampling`, as token sequences
    pooling: Pooling | None = None  # the request ends with its prompt: no token is sampled
    # the output may begin with reasoning: stop conditions apply to the answer only
    is_chat: bool = False


class ReleaseRequest(Struct, tag=True):
    """Gateway → scheduler: the request is answered or aborted.

    Until then the scheduler keeps the request's tokens, because the detokenizer may die before it
    sends them.
    """

    request_id: str
    attempt: int  # a later attempt is not released


class GatewayStarted(Struct, tag=True):
    """Gateway → scheduler: a gateway has started, which does not know the running requests.

    Its attempts begin at `first_attempt`. A request of an earlier attempt has a lease of
    `lease_timeout` seconds, in which a client may resubmit it.
    """

    first_attempt: int


class StopFound(Struct, tag=True):
    """Detokenizer → scheduler: the text holds a stop string; no more tokens are needed."""

    request_id: str
    attempt: int


ToScheduler = TokenizedRequest | ReleaseRequest | StopFound | GatewayStarted


class TokenizeRequest(PromptFields, tag=True, omit_defaults=True):
    """Gateway → tokenizer: a prompt, and the request that its token ids complete."""

    request: TokenizedRequest  # without the fields that the tokenizer fills in
    replica: int = 0  # the replica whose scheduler gets the request


class TokenizerQuery(Struct, tag=True):
    """Gateway → tokenizer: a request that a tokenizer answers alone."""

    number: int
    query: TokenizePromptRequest | DetokenizeRequest


class TokenizerReply(Struct, tag=True):
    """Tokenizer → gateway: the answer to a `TokenizerQuery`."""

    number: int
    reply: TokenizeReply | DetokenizeReply | ErrorReply


class TokenizeDone(Struct, tag=True):
    """Tokenizer → gateway: the request was sent to the scheduler."""

    request_id: str
    attempt: int
    num_prompt_tokens: int = 0


class RequestFailed(Struct, tag=True):
    """Tokenizer or scheduler → gateway: the request can't be served, with the reason."""

    request_id: str
    attempt: int
    error: ErrorReply
    is_poison: bool = False  # the request has killed processes: equal requests are to be refused


ToTokenizer = TokenizeRequest | TokenizerQuery | Refused
FromTokenizer = Heartbeat | Goodbye | TokenizeDone | RequestFailed | TokenizerReply


class StreamOpened(Struct, PackedLists, tag=True, omit_defaults=True):
    """Scheduler → detokenizer: a request to detokenize, with its output so far.

    A stream without output may be opened again, with further `prompt_logprobs`.
    """

    item_bytes: ClassVar = {"prompt_tail": 4, "output_token_ids": 4}

    stream_id: int  # number of the stream in `StepTokens`
    request_id: str
    attempt: int
    prompt_tail: bytes  # the last prompt tokens, which may end within a character: int32
    output_token_ids: bytes  # int32 [num_output_tokens]
    stop: list[str] = []
    # tokens that end the answer; their text is left out, like the text of stop strings
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []  # members of `stop_token_ids` that also end reasoning
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    # an entry for each of `output_token_ids`, None if unknown; None: not requested
    logprobs: list[PackedLogprobs | None] | None = None
    # for each prompt token after the first `prompt_offset` + 1, if known; None: not requested
    prompt_logprobs: list[PackedLogprobs] | None = None
    prompt_offset: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_chat: bool = False  # as in `TokenizedRequest`
    starts_reasoning: bool = False
    # seconds in the scheduler's queue, and from then to the first token
    phase_seconds: tuple[float, float] = (0.0, 0.0)
    finish_reason: FinishReason | None = None  # set if the request has ended already
    pooled: bytes | None = None  # float32, the whole answer to a request with `pooling`


class StepTokens(Struct, PackedLists, tag=True, omit_defaults=True):
    """Scheduler → detokenizer: the new tokens of one step, one message for all its streams."""

    item_bytes: ClassVar = {"stream_ids": 4, "token_ids": 4}
    parallel: ClassVar = ("stream_ids", "token_ids")

    epoch: int
    opened: list[StreamOpened] = []
    stream_ids: bytes = b""  # int32 [num_tokens]
    token_ids: bytes = b""  # int32 [num_tokens], the token of each of `stream_ids`
    finished: list[tuple[int, FinishReason]] = []  # streams that end after these tokens
    # streams to forget without a delta: released, or moved to another detokenizer
    closed: list[int] = []
    # (index in `stream_ids`; logprobs), ascending, for streams that requested logprobs
    logprobs: list[tuple[int, PackedLogprobs]] = []
    # 1 for the first message since the detokenizer registered, then 2, and so on; 0: not counted
    number: int = 0
    # the detokenizer is to answer with `Confirmed` when it has handled this message
    confirm: bool = False


class Confirmed(Struct, tag=True):
    """Detokenizer → scheduler: the message that was to be confirmed is handled."""


class StreamDelta(TextDelta, kw_only=True, tag="delta", omit_defaults=True):
    """Detokenizer → gateway: a `TextDelta`. The gateway does not decode logprobs of prompts."""

    # as in `StreamOpened`, like `prompt_offset`, in MessagePack; complete before the first output
    prompt_logprobs: list[Raw] | None = None  # type: ignore[assignment]
    prompt_offset: int = 0


class TextDeltas(Struct, tag=True):
    """Detokenizer → gateway: the text of one step."""

    deltas: list[StreamDelta]


ToDetokenizer = StepTokens | Refused
FromDetokenizer = Heartbeat | Goodbye | Confirmed
ToGateway = TextDeltas | RequestFailed | SchedulerStatus | SupervisorReport
