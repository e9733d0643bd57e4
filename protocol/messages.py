"""What the processes of the pipeline say to each other, in MessagePack.

One union per direction of a socket; `endpoints.py` has the table of sockets."""

from msgspec import Struct, field

from penstock.protocol.client import (
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    FinishReason,
    PromptFields,
    TextDelta,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.plan import BatchPlan, SampledTokens, check_packed
from penstock.protocol.sampling import Positive, SamplingParams, TokenId
from penstock.protocol.status import ProcessStatus, SchedulerStatus
from penstock.protocol.structured import Reasoning

PROTOCOL_VERSION = 8
"""of this module and `plan.py`; the messages that register a process carry it"""


class Heartbeat(Struct, tag=True):
    """A tokenizer or detokenizer lives. The first one registers it, so none is needed beside."""

    name: str
    version: int = PROTOCOL_VERSION


class Pulse(Struct, tag=True):
    """To the supervisor: a process lives, and how it gets on."""

    name: str
    pid: Positive
    busy_seconds: float = 0.0
    """how long it has been at one step; 0 between steps"""
    group: str = ""
    """workers of one group die together: a collective can't lose a member"""
    counters: dict[str, float] = {}
    """what the process counts about itself, for metrics; see `ProcessStatus.counters`"""
    cpu_seconds: float = 0.0
    """user and system, since its start"""
    rss_bytes: int = 0


class SupervisorReport(Struct, tag=True):
    """Supervisor → gateway, every heartbeat; `draining`: to end when nothing is open."""

    processes: list[ProcessStatus]
    draining: bool = False


class Refused(Struct, tag=True):
    """To a tokenizer or detokenizer that can't take part: it leaves, saying why."""

    reason: str


class Goodbye(Struct, tag=True):
    """A tokenizer or detokenizer stops: what it holds goes to another one."""


class TokenizeRequest(PromptFields, tag=True, omit_defaults=True):
    """Gateway → tokenizer: one submission of a request."""

    request_id: str
    attempt: int
    sampling: SamplingParams
    output_token_ids: list[TokenId] = field(default_factory=list)
    """what an earlier attempt delivered; generation goes on behind it"""
    replica: int = 0
    """whose scheduler gets it"""
    num_deaths: int = 0
    cache_salt: str = ""
    client: str = ""
    priority: int = 0
    """these four as in `TokenizedRequest`"""


class Question(Struct, tag=True):
    """Gateway → tokenizer: something to be answered by a tokenizer alone."""

    number: int
    question: TokenizePromptRequest | DetokenizeRequest


class Answered(Struct, tag=True):
    """Tokenizer → gateway."""

    number: int
    reply: TokenizeReply | DetokenizeReply | ErrorReply


class Tokenized(Struct, tag=True):
    """Tokenizer → gateway: the request is with the scheduler."""

    request_id: str
    attempt: int
    num_prompt_tokens: int = 0


class RequestFailed(Struct, tag=True):
    """Tokenizer or scheduler → gateway: the request can't be served, and why."""

    request_id: str
    attempt: int
    error: ErrorReply
    is_poison: bool = False
    """it has ended processes: asked again, it is to be refused"""


class TokenizedRequest(Struct, tag=True):
    """Tokenizer → scheduler: a request in token ids."""

    request_id: str
    attempt: int
    sampling: SamplingParams
    """every default filled in"""
    prompt_token_ids: bytes
    """int32 [num_prompt_tokens]"""
    output_token_ids: bytes = b""
    """int32, generated and delivered by an earlier attempt"""
    num_deaths: int = 0
    """of another replica's workers, at which it was in flight, since its last token"""
    cache_salt: str = ""
    """only requests with the same salt share KV blocks"""
    client: str = ""
    """who has sent the request: clients take turns"""
    priority: int = 0
    reasoning: Reasoning = "none"
    bad_words: list[list[TokenId]] = []  # those of `sampling`, as token sequences

    def __post_init__(self) -> None:
        check_packed(self.prompt_token_ids, self.output_token_ids)
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty")


class ReleaseRequest(Struct, tag=True):
    """Gateway → scheduler: nobody needs this request any more: it is answered, or aborted.

    Until then the scheduler keeps its tokens, for the detokenizer may die before it passed them on.
    """

    request_id: str
    attempt: int
    """a later one is asked for by somebody"""


class GatewayStarted(Struct, tag=True):
    """Gateway → scheduler: there is a new gateway, which knows nothing of what runs.

    Its attempts begin at `first_attempt`. A request of an earlier attempt has a lease of
    `lease_timeout` seconds, in which a client may ask the new gateway for it.
    """

    first_attempt: int


class StopFound(Struct, tag=True):
    """Detokenizer → scheduler: the text holds a stop string; no more tokens are needed."""

    request_id: str
    attempt: int


class StreamOpened(Struct, tag=True, omit_defaults=True):
    """Scheduler → detokenizer: a request is yours, with all it has generated so far."""

    stream_id: int
    """the number that `TokenDelta` names it by"""
    request_id: str
    attempt: int
    prompt_tail: bytes
    """the last prompt tokens, which may end within a character: int32"""
    output_token_ids: bytes  # int32 [num_output_tokens]
    stop: list[str] = []
    stop_token_ids: list[int] = []
    """tokens that end the output; their text is left out as that of stop strings is"""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: list[PackedLogprobs | None] | None = None
    """one for each of `output_token_ids`, None where they are not known; None: not asked for"""
    prompt_logprobs: list[PackedLogprobs] | None = None
    """one for each prompt token but the first"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    starts_reasoning: bool = False
    phase_seconds: tuple[float, float] = (0.0, 0.0)
    """in the scheduler's queue, and from then to the first token"""
    finish_reason: FinishReason | None = None
    """set if it has ended already"""

    def __post_init__(self) -> None:
        check_packed(self.prompt_tail, self.output_token_ids)
        num_tokens = len(self.output_token_ids) // 4
        if self.logprobs is not None and len(self.logprobs) != num_tokens:
            raise ValueError(f"{len(self.logprobs)} logprobs of {num_tokens} tokens")


class TokenDelta(Struct, tag=True, omit_defaults=True):
    """Scheduler → detokenizer: the new tokens of one step, one message for all its streams."""

    epoch: int
    opened: list[StreamOpened] = []
    stream_ids: bytes = b""
    """int32 [num_tokens]"""
    token_ids: bytes = b""
    """int32 [num_tokens], one for each of `stream_ids`"""
    finished: list[tuple[int, FinishReason]] = []
    """streams that end behind these tokens"""
    closed: list[int] = []
    """streams to forget without a word: released, or another detokenizer's now"""
    logprobs: list[tuple[int, PackedLogprobs]] = []
    """(index in `stream_ids`; its logprobs), of the streams that asked, in ascending order"""
    number: int = 0
    """1 for the first message since the detokenizer registered itself, then 2 …; 0: not counted"""
    confirm: bool = False
    """the detokenizer is to answer with `Confirmed` when it has handled this message"""

    def __post_init__(self) -> None:
        check_packed(self.stream_ids, self.token_ids)
        if len(self.stream_ids) != len(self.token_ids):
            raise ValueError(
                f"{len(self.token_ids)} bytes of tokens, {len(self.stream_ids)} of streams"
            )


class Confirmed(Struct, tag=True):
    """Detokenizer → scheduler: the message that was to be confirmed is handled."""


class TextDeltas(Struct, tag=True):
    """Detokenizer → gateway: the text of one step."""

    deltas: list[TextDelta]


class WorkerHello(Struct, array_like=True, tag=True):
    """Worker → scheduler: who I am and what I hold; sent at start, on change, and as heartbeat."""

    name: str
    group: str = ""
    """the tensor-parallel group it has joined; empty: none yet"""
    rank: int = -1
    num_blocks: int = 0
    """KV blocks that fit; 0: the model is not loaded yet"""
    block_size: int = 0
    """tokens per block"""
    idle_us: tuple[float, float] = (0.0, 0.0)
    """median and 99th percentile of the GPU's wait between two steps; 0 on a CPU"""
    pid: int = 0
    version: int = PROTOCOL_VERSION
    """at the same place in every version, or another one could not be refused"""
    node: str = ""
    """id of its machine; empty where there is only one"""
    rendezvous: str = ""
    """`tcp://host:port` at which it could listen as rank 0, of a worker without a group"""
    incarnation: int = 0
    """a larger one was started later"""


class WorkerAssignment(Struct, array_like=True, tag=True):
    """Scheduler → worker: your place in the tensor-parallel group, or, in a group already, the
    epoch whose plans come next: drop the persistent batch."""

    epoch: int
    group: str
    rank: int
    tp_size: int
    rendezvous: str
    """`tcp://host:port` for torch.distributed"""
    num_blocks: int = 0
    """KV blocks that the group before had, whose requests wait; 0: there was none"""
    pids_before: list[int] = []
    """of that group's members on this worker's machine: their memory is free once they exit"""
    replica: int = 0
    spans_nodes: bool = False
    """whether the group's workers are on several machines"""


class WorkerExit(Struct, array_like=True, tag=True):
    """Scheduler → worker: your group has lost a member; leave, to be started afresh."""

    reason: str


ToTokenizer = TokenizeRequest | Question | Refused
FromTokenizer = Heartbeat | Goodbye | Tokenized | RequestFailed | Answered
ToScheduler = TokenizedRequest | ReleaseRequest | StopFound | GatewayStarted
ToDetokenizer = TokenDelta | Refused
FromDetokenizer = Heartbeat | Goodbye | Confirmed
ToWorker = WorkerAssignment | WorkerExit | BatchPlan
FromWorker = WorkerHello | SampledTokens
ToGateway = TextDeltas | RequestFailed | SchedulerStatus | SupervisorReport
