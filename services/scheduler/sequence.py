"""The state of a request in the scheduler: its tokens, blocks and progress."""

from collections import deque
from collections.abc import Collection
from dataclasses import InitVar, dataclass, field
from enum import Enum
from time import monotonic

import xxhash

from penstock.protocol.messages.client import ErrorReply, FinishReason
from penstock.protocol.messages.packed import PackedLogprobs, pack, unpack
from penstock.protocol.messages.pipeline import TokenizedRequest
from penstock.protocol.messages.sampling import Pooling, SamplingParams
from penstock.protocol.messages.structured import Reasoning
from penstock.protocol.tokenizer_file import NO_TAGS, ReasoningTokens, ReasoningTracker
from penstock.services.scheduler.proposer import Proposer

# consecutive worker failures without a new token after which a request fails
MAX_WORKER_DEATHS = 3
# number of preemptions of a sequence after which sequences with fewer are preempted first
MAX_PREEMPTIONS = 4
TOKEN_BYTES = 4  # bytes of a packed token id
# Limit on the logprobs of a prompt: a detokenizer takes a second for this number. A detokenizer
# that is busy for five seconds is replaced, and its successor would stall again.
MAX_PROMPT_LOGPROBS = 1 << 19


class CannotFitError(ValueError):
    """A request that can't run even alone, with the field and numbers in the message."""

    @property
    def reply(self) -> ErrorReply:
        message = str(self)
        return ErrorReply(code="invalid", message=message, field=message.partition(":")[0])


class Status(Enum):
    """The scheduling state of a sequence."""

    WAITING = "waiting"  # not in the persistent batch: new or preempted
    # has a slot, and a row in every plan until its last token is planned, unless it is paused
    RUNNING = "running"
    DRAINING = "draining"  # the last token is in flight; has blocks, but no slot
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Tokens, blocks and progress of one request.

    Fields are written by methods of this class and by this code (see `test_sequence_writers.py`):

    - `Scheduler`: status, finish_reason, slot, token_ids, last_step, num_deaths, num_lost_tokens,
      num_preemptions, num_planned_tokens, logprobs, may_have_drafts
    - `BlockManager`: block_table, capacity, num_prefill_tokens, prefill_begin,
      num_planned_tokens, num_computed_tokens, num_published_blocks, published_content,
      record_place, loads, has_fetched, block_hashes, num_kept_blocks, num_kept_tokens, tried,
      awaited
    - `StateBlocks`: state_blocks, state_plans, checkpoints
    - `OffloadIndex`: has_fetched, loads, awaited
    - `DraftScheduler`: proposer, num_planned_tokens, last_step
    - `WaitingQueue`: admission
    - `GrammarIndex`: grammar
    - `Streams`: detokenizer, stream_id, num_sent
    - `SchedulerProcess`: attempt
    - `SequencePoison`: num_deaths
    - `sequence.count_death`: num_deaths, died_at
    """

    request: InitVar[TokenizedRequest]
    eos_token_ids: InitVar[frozenset[int]]
    reasoning_tokens: InitVar[ReasoningTokens] = NO_TAGS
    request_id: str = field(init=False)
    attempt: int = field(init=False)
    client: str = field(init=False)
    priority: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    seed: int = field(init=False)
    reasoning: Reasoning = field(init=False)
    bad_words: list[list[int]] = field(init=False)
    # parameters of a pooling request, which ends after its prompt without a token
    pooling: Pooling | None = field(init=False)
    is_chat: bool = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)  # EOS tokens; empty with `ignore_eos`
    # `end_token_ids`, and stop tokens that end the answer, but not reasoning
    stop_token_ids: frozenset[int] = field(init=False)
    # the tracker of reasoning in a chat with stop tokens; it was fed `num_tracked_tokens` tokens
    tracker: ReasoningTracker | None = field(init=False)
    num_tracked_tokens: int = field(init=False)
    token_ids: list[int] = field(init=False)
    packed_prompt: bytes = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # worker failures while this sequence was in flight, since its last token
    num_deaths: int = field(init=False)
    died_at: int = -1  # most positions that were planned at these failures; -1: none here
    cache_salt: str = field(init=False)
    # logprobs of each output token, None for tokens of an earlier attempt; None: not requested
    logprobs: list[PackedLogprobs | None] | None = None
    # known logprobs of the prompt tokens after the first; None: not requested
    prompt_logprobs: list[PackedLogprobs] | None = None
    num_sent: int = 0  # of `prompt_logprobs`, that the detokenizer was sent
    pooled: bytes | None = None  # result of `pooling`
    arrived_at: float = field(default_factory=monotonic)
    scheduled_at: float = 0.0
    first_token_at: float = 0.0  # arrival at the scheduler; 0 before it
    admission: int = -1  # number of the first admission to the running batch
    # maximum number of tokens, prompt and output; set by `Scheduler.add`
    max_length: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    slot: int = -1
    last_step: int = -1  # number of the last plan that includes this sequence
    # tokens known at the last admission: these are prefilled, later tokens are decoded
    num_prefill_tokens: int = 0
    prefill_begin: int = 0  # position at which this prefill began
    # positions whose KV is computed by the plans sent so far, drafts included, or was found in the
    # prefix cache
    num_planned_tokens: int = 0
    # positions of the prefill that results have confirmed since the last admission
    num_computed_tokens: int = 0
    # positions that were planned before a preemption or a failure of workers or scheduler: KV that
    # is not found in the cache is recomputed
    num_lost_tokens: int = 0
    # number of the compiled grammar; 0 without a grammar, or before its compilation
    grammar: int = 0
    may_have_drafts: bool = True
    proposer: Proposer | None = None  # made at admission, if the sequence may have drafts
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    capacity: int = 0  # positions for which the blocks have room
    # state blocks that the next step reads and writes; -1: none, or not chosen yet
    state_blocks: tuple[int, int] = (-1, -1)
    # number of the plan that has first written each of `state_blocks`; -1: before this epoch;
    # -2: loaded from the host, and not published yet
    state_plans: tuple[int, int] = (-1, -1)
    checkpoints: list[int] = field(default_factory=list)  # positions at which the state is kept
    # (key, place) of copies from the host that are not planned yet: last planned blocks, checkpoint
    loads: deque[tuple[bytes, int]] = field(default_factory=deque)
    has_fetched: bool = False  # True if files of the folder tier were requested
    awaited: bytes = b""  # hash of a block in a tier for which the last try had to wait
    # of the last try that lacked blocks: the number of cached blocks, and of blocks that would have
    # been left (negative), less `BlockPool.num_released`
    tried: tuple[int, int] | None = None
    # of the first full blocks, computed when needed
    block_hashes: list[bytes] = field(default_factory=list)
    # number of blocks that were kept when the sequence was preempted, which have the last hashes,
    # random ones; and of the tokens that were planned until then
    num_kept_blocks: int = 0
    num_kept_tokens: int = 0
    detokenizer: bytes | None = None  # identity of the detokenizer
    stream_id: int = -1
    num_published_blocks: int = 0
    # number of the last published block's content; see `BlockPool.publish`
    published_content: int = 0
    # index of the next token in `BlockRecords.tokens`; 0: the last block is not recorded
    record_place: int = 0

    def __post_init__(
        self,
        request: TokenizedRequest,
        eos_token_ids: frozenset[int],
        reasoning_tokens: ReasoningTokens,
    ) -> None:
        self.request_id, self.attempt = request.request_id, request.attempt
        self.client, self.priority = request.client, request.priority
        self.cache_salt = request.cache_salt
        self.sampling = sampling = request.sampling
        self.may_have_drafts = sampling.speculative
        own_seed = xxhash.xxh64_intdigest(request.request_id.encode()) >> 1  # equal after a restart
        self.seed = own_seed if sampling.seed is None else sampling.seed
        self.reasoning, self.bad_words = request.reasoning, request.bad_words
        self.pooling = request.pooling
        self.num_deaths = request.num_deaths
        # After the end of a grammar, only EOS tokens can be sampled.
        ignores_eos = sampling.ignore_eos and sampling.structured_outputs is None
        self.end_token_ids = frozenset() if ignores_eos else eos_token_ids
        self.stop_token_ids = self.end_token_ids | frozenset(sampling.stop_token_ids)
        self.is_chat, self.tracker = request.is_chat, None
        if request.is_chat and sampling.stop_token_ids:
            self.tracker = ReasoningTracker(reasoning_tokens, self.reasoning == "open")
        prompt, output = unpack(request.prompt_token_ids), unpack(request.output_token_ids)
        self.token_ids, self.packed_prompt = [*prompt, *output], request.prompt_token_ids
        self.num_prompt_tokens = self.num_tracked_tokens = len(prompt)
        self.num_lost_tokens = len(self.token_ids) - 1 if output else 0
        if sampling.logprobs is not None:
            self.logprobs = [None] * len(output)
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def packed_token_ids(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the token ids [begin, end), packed, by default all."""
        end, own = len(self.token_ids) if end is None else end, self.num_prompt_tokens
        prompt = self.packed_prompt[TOKEN_BYTES * begin : TOKEN_BYTES * end]
        return prompt + pack(self.token_ids[max(begin, own) : end]) if end > own else prompt

    def equals(self, other: "Sequence", begin: int, end: int) -> bool:
        """Return whether the token ids [begin, end) of both sequences are equal."""
        return self.packed_token_ids(begin, end) == other.packed_token_ids(begin, end)

    def packed_block(self, index: int, size: int) -> bytes:
        """Return the packed token ids of a full block of `size` tokens."""
        return self.packed_token_ids(index * size, (index + 1) * size)

    def is_stopped(self) -> bool:
        """Return whether the last token ends the output.

        Only EOS ends the output during reasoning, or in the white space after reasoning.
        """
        token_id = self.token_ids[-1]
        if token_id not in self.stop_token_ids or token_id in self.end_token_ids:
            return token_id in self.stop_token_ids
        if self.tracker is None:
            return True
        for following in self.token_ids[self.num_tracked_tokens :]:
            self.tracker.feed(following)
        self.num_tracked_tokens = len(self.token_ids)
        return not (self.tracker.is_open or self.tracker.is_blank)

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Order of preemption: the sequence with the highest rank is preempted first.

        The rank is the priority, then the admission. After MAX_PREEMPTIONS the priority of a
        sequence does not count, and sequences with fewer than MAX_PREEMPTIONS are preempted first.
        """
        is_young = self.num_preemptions < MAX_PREEMPTIONS
        return is_young, self.priority if is_young else 0, self.admission

    @property
    def is_suspect(self) -> bool:
        """True if the sequence must run alone: at the next worker failure it would be poison."""
        return self.num_deaths >= MAX_WORKER_DEATHS - 1

    @property
    def may_run(self) -> bool:
        """True unless the sequence's grammar is not compiled yet."""
        return self.grammar > 0 or self.sampling.structured_outputs is None

    @property
    def has_place(self) -> bool:
        """True if the blocks have room for every known token."""
        return len(self.token_ids) <= self.capacity

    @property
    def is_paused(self) -> bool:
        """True if only a draft can name the sequence's next input token in a plan."""
        return self.proposer is not None and self.proposer.is_paused

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if prompt logprobs are requested and not complete."""
        known = self.prompt_logprobs
        return known is not None and len(known) < self.num_prompt_tokens - 1

    @property
    def has_begun(self) -> bool:
        """True if the stream may be opened: there are tokens or prompt logprobs to tell."""
        has_output = len(self.token_ids) > self.num_prompt_tokens and not self.needs_prompt_logprobs
        return self.num_prefill_tokens > 0 and (has_output or bool(self.prompt_logprobs))

    @property
    def num_confirmed_tokens(self) -> int:
        """Number of positions whose KV no plan in flight writes.

        A sequence continues after these positions when its workers die and their memory remains.
        The number is 0 while the sequence's first plan is in flight.
        """
        if self.num_computed_tokens < self.num_prefill_tokens:
            return self.num_computed_tokens
        return len(self.token_ids) - 1

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens of the prefill that are in no plan yet."""
        return self.num_prefill_tokens - self.num_planned_tokens

    def confirm_chunk(self, end: int) -> None:
        """Note that the prefill is computed up to a position.

        A sequence that comes further than at worker failures is not what the workers died of.
        """
        self.num_computed_tokens = end
        if 0 <= self.died_at < end:
            self.num_deaths = 0

    def limit_length(self, max_length: int) -> None:
        """Set `max_length`. Raises CannotFitError."""
        room = 1 if self.pooling is None else 0
        most = max_length - room
        if self.num_prompt_tokens > most:
            raise CannotFitError(
                f"prompt: got {self.num_prompt_tokens} tokens, expected up to {most}, "
                "which fit into the context and the KV pool"
            )
        max_tokens = (self.sampling.max_tokens or max_length) if room else 1
        self.max_length = min(self.num_prompt_tokens + max_tokens, most + 1)

    def check(self, vocab_size: int) -> None:
        """Check token ids against the vocabulary, and the number of prompt logprobs.

        Raises CannotFitError.
        """
        most = f"expected up to {vocab_size - 1}"
        if not self.num_prompt_tokens:
            raise CannotFitError("prompt: got no token, expected one or more")
        for extreme in (min(self.token_ids), max(self.token_ids)):
            if not 0 <= extreme < vocab_size:  # else every worker and its successor would exit
                raise CannotFitError(f"prompt: got token id {extreme}, {most}")
        named = {
            "logit_bias": self.sampling.logit_bias,
            "allowed_token_ids": self.sampling.allowed_token_ids or (),
            "pooling.label_ids": self.pooling.label_ids if self.pooling else (),
        }
        for name, ids in named.items():
            if (largest := max(ids, default=0)) >= vocab_size:
                raise CannotFitError(f"{name}: got token id {largest}, {most}")
        num_top = self.sampling.prompt_logprobs
        if num_top is not None and (1 + num_top) * self.num_prompt_tokens > MAX_PROMPT_LOGPROBS:
            raise CannotFitError(
                f"prompt_logprobs: got {num_top} for a prompt of {self.num_prompt_tokens} tokens, "
                f"expected up to {MAX_PROMPT_LOGPROBS} logprobs in total"
            )

    def admit(self, slot: int) -> None:
        """Admit the sequence, which already has blocks, to the running batch at this slot."""
        self.status = Status.RUNNING
        self.slot, self.prefill_begin = slot, self.num_planned_tokens
        self.scheduled_at = self.scheduled_at or monotonic()
        if not self.num_preemptions:
            self.num_cached_tokens = min(self.num_planned_tokens, self.num_prompt_tokens)

    def phase_seconds(self) -> tuple[float, float]:
        """Return (seconds in the queue, seconds of the prefill); 0 before the first result."""
        has_text = len(self.token_ids) > self.num_prompt_tokens
        if not self.scheduled_at or not (has_text or self.pooled):
            return 0.0, 0.0
        self.first_token_at = self.first_token_at or monotonic()
        return self.scheduled_at - self.arrived_at, self.first_token_at - self.scheduled_at

    def add_logprobs(self, packed: PackedLogprobs) -> None:
        """Append logprobs of a new token."""
        if self.logprobs is not None:
            self.logprobs.append(packed)

    def add_prompt_logprobs(self, chunk: list[PackedLogprobs]) -> bool:
        """Add logprobs up to `num_computed_tokens`. Return False if all are known, or too late.

        After a preemption, all prompt logprobs are computed again.
        """
        if self.prompt_logprobs is None or self.finish_reason:
            return False
        begin = min(self.num_computed_tokens, self.num_prompt_tokens - 1) - len(chunk)
        new = chunk[len(self.prompt_logprobs) - begin :]
        self.prompt_logprobs += new
        return bool(new)

    def set_pooled(self, numbers: bytes) -> bool:
        """Set the result of `pooling`. Return False if the sequence has ended."""
        if self.finish_reason is None:
            self.pooled, self.num_deaths = numbers, 0
        return self.finish_reason is None

    def is_requested_by(self, request: TokenizedRequest) -> bool:
        """Return whether `request` is equal, with an output that is a prefix of this output."""
        prompt, output = unpack(request.prompt_token_ids), unpack(request.output_token_ids)
        return (
            (request.sampling, request.pooling) == (self.sampling, self.pooling)
            and len(prompt) == self.num_prompt_tokens
            and [*prompt, *output] == self.token_ids[: len(prompt) + len(output)]
            and None not in (self.logprobs or [])[len(output) :]  # else these logprobs are lost
        )


def count_death(in_flight: Collection[Sequence]) -> list[Sequence]:
    """Count a worker failure. Return the poison request, if any.

    A poison request is a suspect that was alone in flight, even if it was aborted meanwhile.
    """
    guilty = [sequence for sequence in in_flight if sequence.is_suspect and len(in_flight) == 1]
    for sequence in in_flight:
        limit = MAX_WORKER_DEATHS if sequence in guilty else MAX_WORKER_DEATHS - 1
        before = sequence.died_at if sequence.num_deaths else -1
        sequence.num_deaths = min(sequence.num_deaths + 1, limit)
        sequence.died_at = max(before, sequence.num_planned_tokens)
    return [sequence for sequence in guilty if sequence.finish_reason in (None, "abort")]
