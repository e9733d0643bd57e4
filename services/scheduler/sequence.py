"""A request in the scheduler: a growing list of tokens."""

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
from penstock.services.scheduler.ngram_lookup import NgramLookup

# deaths of workers in a row, without a token in between, after which a request is given up
MAX_WORKER_DEATHS = 3
# preemptions of a sequence by those with a better priority; then it keeps its blocks
MAX_PREEMPTIONS = 4
TOKEN_BYTES = 4  # of a packed token id
# logprobs of one prompt. A detokenizer handles this number in a second, and nothing else in this
# time. After five seconds it would be given up, and the next detokenizer, too.
MAX_PROMPT_LOGPROBS = 1 << 19


class CannotFitError(ValueError):
    """A request that could not run even alone; the message names the numbers."""

    @property
    def reply(self) -> ErrorReply:
        message = str(self)
        return ErrorReply(code="invalid", message=message, field=message.partition(":")[0])


class Status(Enum):
    """The state of a sequence."""

    WAITING = "waiting"  # not in the persistent batch; new, or preempted
    # has a slot; part of every plan until its end is planned, unless it is paused
    RUNNING = "running"
    DRAINING = "draining"  # its last token is in a plan in flight; it has blocks, but no slot
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Tokens, blocks and progress of one request.

    In addition to its own methods, these write its fields (compared by test_sequence_writers.py):

    - `Scheduler`: status, finish_reason, slot, token_ids, last_step, num_deaths, num_lost_tokens,
      num_preemptions, num_planned_tokens, num_computed_tokens
    - `BlockManager`: block_table, capacity, num_prefill_tokens, num_planned_tokens,
      num_computed_tokens, num_published_blocks, published_content, record_place, loads,
      has_fetched, full_blocks
    - `OffloadIndex`: has_fetched, loads
    - `DraftScheduler`: ngram_lookup, num_planned_tokens, last_step
    - `WaitingQueue`: admission
    - `GrammarIndex`: grammar
    - `Streams`: detokenizer, stream_id
    - `SchedulerProcess`: attempt
    - `SequencePoison`: num_deaths
    - `sequence.count_death`: num_deaths
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
    # the sequence ends with its prompt, without a token
    pooling: Pooling | None = field(init=False)
    is_chat: bool = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)  # EOS, unless it is ignored
    # `end_token_ids`, and tokens that end the answer, but not reasoning
    stop_token_ids: frozenset[int] = field(init=False)
    # of a chat whose reasoning has stop tokens to outlive; it knows `num_tracked_tokens`
    tracker: ReasoningTracker | None = field(init=False)
    num_tracked_tokens: int = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # deaths of workers at which it was in flight, since its last token
    num_deaths: int = field(init=False)
    cache_salt: str = field(init=False)
    # logprobs of each output token, None for tokens of an earlier attempt; None: not requested
    logprobs: list[PackedLogprobs | None] | None = None
    # known logprobs of the prompt tokens after the first; None: not requested
    prompt_logprobs: list[PackedLogprobs] | None = None
    pooled: bytes | None = None  # result of `pooling`
    arrived_at: float = field(default_factory=monotonic)
    scheduled_at: float = 0.0
    first_token_at: float = 0.0  # at the scheduler; 0: not yet
    admission: int = -1  # number of its first admission to the running batch
    # limit of tokens, prompt and output; set when the scheduler takes the sequence
    max_length: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    slot: int = -1
    last_step: int = -1  # number of the last plan that includes it
    # tokens known when it was last admitted: these are prefilled, the rest is decoded
    num_prefill_tokens: int = 0
    # positions whose KV is computed by the plans sent so far, or was found in the cache; some may
    # be those of guesses
    num_planned_tokens: int = 0
    # positions of the prefill whose KV a result has confirmed since its admission
    num_computed_tokens: int = 0
    # positions that were planned before a preemption or a death, also of a scheduler: where their
    # KV is not found, it is computed again
    num_lost_tokens: int = 0
    # number of its compiled grammar; 0: it has none, or is not planned yet
    grammar: int = 0
    ngram_lookup: NgramLookup | None = None  # made at its admission, if it speculates
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    capacity: int = 0  # positions for which its blocks have room
    # hashes of its last planned blocks, whose copies from the host are still to be planned
    loads: deque[bytes] = field(default_factory=deque)
    has_fetched: bool = False  # its files have been requested
    # (hash, token ids) of its full blocks, as far as they have been needed
    full_blocks: list[tuple[bytes, bytes]] = field(default_factory=list)
    detokenizer: bytes | None = None  # identity of its detokenizer
    stream_id: int = -1
    num_published_blocks: int = 0
    # number of its last published block's content; see `BlockPool.publish`
    published_content: int = 0
    # place of its next token in `BlockRecords.tokens`; 0: its last block is not recorded
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
        own_seed = xxhash.xxh64_intdigest(request.request_id.encode()) >> 1  # after a restart, too
        self.seed = own_seed if sampling.seed is None else sampling.seed
        self.reasoning, self.bad_words = request.reasoning, request.bad_words
        self.pooling = request.pooling
        self.num_deaths = request.num_deaths
        # After the end of a grammar, only these tokens can be sampled.
        ignores_eos = sampling.ignore_eos and sampling.structured_outputs is None
        self.end_token_ids = frozenset() if ignores_eos else eos_token_ids
        self.stop_token_ids = self.end_token_ids | frozenset(sampling.stop_token_ids)
        self.is_chat, self.tracker = request.is_chat, None
        if request.is_chat and sampling.stop_token_ids:
            self.tracker = ReasoningTracker(reasoning_tokens, self.reasoning == "open")
        prompt, output = unpack(request.prompt_token_ids), unpack(request.output_token_ids)
        self.token_ids = [*prompt, *output]
        self.num_prompt_tokens = self.num_tracked_tokens = len(prompt)
        self.num_lost_tokens = len(self.token_ids) - 1 if output else 0
        if sampling.logprobs is not None:
            self.logprobs = [None] * len(output)
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def packed_token_ids(self) -> bytes:
        """Return all token ids, packed; full blocks have been packed before."""
        known = b"".join(token_ids for _, token_ids in self.full_blocks)
        return known + pack(self.token_ids[len(known) // TOKEN_BYTES :])

    def is_stopped(self) -> bool:
        """Return whether the last token ends the output.

        Reasoning is ended by EOS only, and so is the white space after it.
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
        """Order of preemption, the highest first: by priority, then by admission.

        The priority of a sequence that was preempted often does not count.
        """
        is_young = self.num_preemptions < MAX_PREEMPTIONS
        return is_young, self.priority if is_young else 0, self.admission

    @property
    def is_suspect(self) -> bool:
        """True if it must run alone: it would be given up at the next death."""
        return self.num_deaths >= MAX_WORKER_DEATHS - 1

    @property
    def may_run(self) -> bool:
        """True unless the workers do not have its grammar yet."""
        return self.grammar > 0 or self.sampling.structured_outputs is None

    @property
    def has_place(self) -> bool:
        """True if its blocks have room for every known token."""
        return len(self.token_ids) <= self.capacity

    @property
    def is_paused(self) -> bool:
        """True if a plan computes nothing of it unless a draft names it."""
        return self.ngram_lookup is not None and self.ngram_lookup.is_paused

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if they are requested, and some are missing."""
        known = self.prompt_logprobs
        return known is not None and len(known) < self.num_prompt_tokens - 1

    @property
    def has_begun(self) -> bool:
        """True if output may be passed on: not before all logprobs of the prompt are known."""
        is_text = self.pooling is None and not self.needs_prompt_logprobs
        return self.num_prefill_tokens > 0 and is_text

    def limit_length(self, max_length: int) -> None:
        """Set the length at which the sequence ends. Raises CannotFitError."""
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
        """Check the parameters that depend on the model. Raises CannotFitError.

        The model must know each token id, and logprobs must not be too many.
        """
        most = f"expected up to {vocab_size - 1}"
        if not self.num_prompt_tokens:
            raise CannotFitError("prompt: got no token, expected one or more")
        for extreme in (min(self.token_ids), max(self.token_ids)):
            if not 0 <= extreme < vocab_size:  # every worker, and its successor, would exit
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
        """Give the sequence, which has its blocks, a slot: it is part of the next plan."""
        self.status = Status.RUNNING
        self.slot = slot
        self.scheduled_at = self.scheduled_at or monotonic()
        if self.needs_prompt_logprobs:
            self.prompt_logprobs = []  # all are computed again
        if not self.num_preemptions:
            self.num_cached_tokens = min(self.num_planned_tokens, self.num_prompt_tokens)

    def phase_seconds(self) -> tuple[float, float]:
        """Return seconds in the queue and of the prefill; 0 before the first result."""
        has_text = len(self.token_ids) > self.num_prompt_tokens
        if not self.scheduled_at or not (has_text or self.pooled):
            return 0.0, 0.0
        self.first_token_at = self.first_token_at or monotonic()
        return self.scheduled_at - self.arrived_at, self.first_token_at - self.scheduled_at

    def add_logprobs(self, packed: PackedLogprobs) -> None:
        """Append logprobs of its next token, unless it has ended."""
        if self.logprobs is not None and self.finish_reason is None:
            self.logprobs.append(packed)

    def add_prompt_logprobs(self, chunk: list[PackedLogprobs]) -> None:
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += chunk

    def set_pooled(self, numbers: bytes) -> bool:
        """Set the result of `pooling`. Return False if the sequence has ended."""
        if self.finish_reason is None:
            self.pooled, self.num_deaths = numbers, 0
        return self.finish_reason is None

    def is_requested_by(self, request: TokenizedRequest) -> bool:
        """Return whether `request` is for this output, of which it knows no more."""
        prompt, output = unpack(request.prompt_token_ids), unpack(request.output_token_ids)
        return (
            (request.sampling, request.pooling) == (self.sampling, self.pooling)
            and len(prompt) == self.num_prompt_tokens
            and [*prompt, *output] == self.token_ids[: len(prompt) + len(output)]
            and None not in (self.logprobs or [])[len(output) :]  # else nobody has these logprobs
        )


def count_death(in_flight: Collection[Sequence]) -> list[Sequence]:
    """Count a death of the workers. Return the sequence that is given up, if any.

    It is a suspect that was alone in flight, even if it was aborted meanwhile.
    """
    guilty = [sequence for sequence in in_flight if sequence.is_suspect and len(in_flight) == 1]
    for sequence in in_flight:
        limit = MAX_WORKER_DEATHS if sequence in guilty else MAX_WORKER_DEATHS - 1
        sequence.num_deaths = min(sequence.num_deaths + 1, limit)
    return [sequence for sequence in guilty if sequence.finish_reason in (None, "abort")]
