"""Messages between scheduler, detokenizers and gateway."""

from typing import ClassVar

from msgspec import Struct

from penstock.protocol.messages.client import FinishReason, TextDelta
from penstock.protocol.messages.logprobs import PackedLogprobs
from penstock.protocol.messages.packed import PackedLists
from penstock.protocol.messages.registration import Goodbye, Heartbeat, Refused
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.messages.tokenizer import RequestFailed


class StreamOpened(Struct, PackedLists, tag=True, omit_defaults=True):
    """Scheduler → detokenizer: a request to detokenize, with its output so far."""

    item_bytes: ClassVar = {"prompt_tail": 4, "output_token_ids": 4}

    stream_id: int  # the number that `StepTokens` names it by
    request_id: str
    attempt: int
    prompt_tail: bytes  # the last prompt tokens, which may end within a character: int32
    output_token_ids: bytes  # int32 [num_output_tokens]
    stop: list[str] = []
    # tokens that end the answer; their text is left out as that of stop strings is
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []  # those of `stop_token_ids` that end reasoning, too
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    # one for each of `output_token_ids`, None where unknown; None: not requested
    logprobs: list[PackedLogprobs | None] | None = None
    prompt_logprobs: list[PackedLogprobs] | None = None  # one for each prompt token but the first
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_chat: bool = False  # as in `TokenizedRequest`
    starts_reasoning: bool = False
    # in the scheduler's queue, and from then to the first token
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
    token_ids: bytes = b""  # int32 [num_tokens], one for each of `stream_ids`
    finished: list[tuple[int, FinishReason]] = []  # streams that end after these tokens
    # streams to forget without a delta: released, or moved to another detokenizer
    closed: list[int] = []
    # (index in `stream_ids`; its logprobs), ascending, of the streams that requested them
    logprobs: list[tuple[int, PackedLogprobs]] = []
    # 1 for the first message since the detokenizer registered itself, then 2 …; 0: not counted
    number: int = 0
    # the detokenizer is to answer with `Confirmed` when it has handled this message
    confirm: bool = False


class Confirmed(Struct, tag=True):
    """Detokenizer → scheduler: the message that was to be confirmed is handled."""


class TextDeltas(Struct, tag=True):
    """Detokenizer → gateway: the text of one step."""

    deltas: list[TextDelta]


ToDetokenizer = StepTokens | Refused
FromDetokenizer = Heartbeat | Goodbye | Confirmed
ToGateway = TextDeltas | RequestFailed | SchedulerStatus | SupervisorReport
