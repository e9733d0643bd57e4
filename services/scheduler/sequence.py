"""A request in the scheduler: a growing list of tokens."""

from enum import Enum
from hashlib import sha256
from time import monotonic

import xxhash

from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.logprobs import PackedLogprobs
from penstock.protocol.messages.plan import RowAdded, RowExtras, pack, unpack
from penstock.protocol.messages.scheduler import TokenizedRequest
from penstock.services.scheduler.speculative import Speculation

MAX_PREEMPTIONS = 4
"""of a sequence by others with a better priority; afterwards it keeps its blocks"""


MAX_PROMPT_LOGPROBS = 1 << 19
"""of one prompt. They are sent at once: for this number a detokenizer takes a second, in which it
handles nothing else; after five seconds it would be given up, and the next one too"""


class CannotFitError(ValueError):
    """A request that could not run even alone; the message names the numbers."""


class Status(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    """not in the persistent batch; new, or preempted"""
    RUNNING = "running"
    """has a slot; part of every plan until its end is planned, unless it is paused"""
    DRAINING = "draining"
    """its last token is in a plan in flight; it has blocks, but no slot"""
    FINISHED = "finished"


class Sequence:
    """Tokens, blocks and progress of one request.

    Besides its own methods, these classes write its fields (a test compares):

    - `Scheduler`: status, finish_reason, slot, token_ids, last_step, num_deaths,
      num_planned_tokens, num_preemptions, num_cached_tokens, prompt_logprobs
    - `BlockManager`: block_table, num_prefill_tokens, num_planned_tokens, num_published_blocks,
      published_content
    - `NgramProposer`: speculation, num_planned_tokens, last_step
    - `WaitingQueue`: admission
    - `Streams`: detokenizer, stream_id
    - `SchedulerProcess`: attempt
    - `poison`: num_deaths
    """

    __slots__ = (
        "admission",
        "arrived_at",
        "attempt",
        "bad_words",
        "block_table",
        "cache_root",
        "client",
        "detokenizer",
        "finish_reason",
        "first_token_at",
        "full_blocks",
        "last_step",
        "logprobs",
        "max_length",
        "num_cached_tokens",
        "num_deaths",
        "num_planned_tokens",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "priority",
        "prompt_logprobs",
        "published_content",
        "reasoning",
        "request_id",
        "sampling",
        "scheduled_at",
        "seed",
        "slot",
        "speculation",
        "status",
        "stop_token_ids",
        "stream_id",
        "token_ids",
    )

    def __init__(self, request: TokenizedRequest, eos_token_ids: frozenset[int]) -> None:
        prompt = unpack(request.prompt_token_ids)
        self.request_id = request.request_id
        self.arrived_at = monotonic()
        self.scheduled_at = self.first_token_at = 0.0
        """at the scheduler; 0: not yet"""
        self.attempt, self.reasoning = request.attempt, request.reasoning
        self.client, self.priority = request.client, request.priority
        self.admission = -1
        """number of its first admission to the running batch"""
        self.sampling = sampling = request.sampling
        self.bad_words = request.bad_words
        self.seed = seed_of(request)
        # After the end of a grammar, only these tokens can be sampled.
        ignores_eos = sampling.ignore_eos and sampling.structured_outputs is None
        eos = frozenset() if ignores_eos else eos_token_ids
        self.stop_token_ids = eos | frozenset(sampling.stop_token_ids)
        self.token_ids: list[int] = [*prompt, *unpack(request.output_token_ids)]
        self.num_prompt_tokens = len(prompt)
        num_output_tokens = len(self.token_ids) - len(prompt)
        self.logprobs: list[PackedLogprobs | None] | None = (
            None if sampling.logprobs is None else [None] * num_output_tokens
        )
        """of each output token, None for those of an earlier attempt; None if not requested"""
        self.prompt_logprobs: list[PackedLogprobs] | None = (
            None if sampling.prompt_logprobs is None else []
        )
        """of the prompt tokens after the first, as far as they are known; None if not requested"""
        self.max_length = 0
        """limit of tokens, prompt and output; set when the scheduler takes the sequence"""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.slot = -1
        self.last_step = -1
        """number of the last plan it is part of"""
        self.num_prefill_tokens = 0
        """tokens known when it was last admitted: these are prefilled, the rest is decoded"""
        self.num_planned_tokens = 0
        """positions whose KV is computed by the plans sent so far, or was found in the cache; some
        may be those of guesses"""
        self.speculation: Speculation | None = None
        """made at its admission, if it speculates"""
        self.num_cached_tokens = 0
        """prompt tokens found in the prefix cache when it was first admitted"""
        self.num_preemptions = 0
        self.num_deaths = request.num_deaths
        """deaths of workers at which it was in flight, since its last token"""
        self.block_table: list[int] = []
        self.cache_root = (
            sha256(request.cache_salt.encode()).digest() if request.cache_salt else b""
        )
        """prefix of the first block's tokens in its hash: other salts have other blocks"""
        self.full_blocks: list[tuple[bytes, bytes]] = []
        """(hash, token ids) of its full blocks, as far as they have been needed"""
        self.detokenizer: bytes | None = None
        """identity of the process that makes its text"""
        self.stream_id = -1
        self.num_published_blocks = 0
        self.published_content = 0
        """number of its last published block's content; see `BlockPool.publish`"""

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated and confirmed."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Order of preemption, the highest first: by priority, then by admission.

        The priority of a sequence that was preempted often does not count.
        """
        is_young = self.num_preemptions < MAX_PREEMPTIONS
        return is_young, self.priority if is_young else 0, self.admission

    @property
    def is_paused(self) -> bool:
        """True if a plan computes nothing of it unless a draft names it."""
        return self.speculation is not None and self.speculation.is_paused

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if they are requested, and some are missing."""
        known = self.prompt_logprobs
        return known is not None and len(known) < self.num_prompt_tokens - 1

    def limit_length(self, max_length: int) -> None:
        """Set the length at which the sequence ends. Raises CannotFitError."""
        if self.num_prompt_tokens >= max_length:
            raise CannotFitError(
                f"prompt has {self.num_prompt_tokens} tokens; at most {max_length - 1} "
                "fit into the context and the KV pool"
            )
        max_tokens = self.sampling.max_tokens or max_length
        self.max_length = min(self.num_prompt_tokens + max_tokens, max_length)

    def check(self, vocab_size: int) -> None:
        """Check what gateway and tokenizer can't. Raises CannotFitError."""
        for extreme in (min(self.token_ids), max(self.token_ids)):
            if not 0 <= extreme < vocab_size:  # every worker, and its successor, would exit
                raise CannotFitError(
                    f"prompt has token id {extreme}; ids go up to {vocab_size - 1}"
                )
        sampling = self.sampling
        named = {
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids or (),
        }
        for field, token_ids in named.items():
            if (largest := max(token_ids, default=0)) >= vocab_size:
                raise CannotFitError(
                    f"{field} has token id {largest}; ids go up to {vocab_size - 1}"
                )
        num_top = sampling.prompt_logprobs
        if num_top is not None and (1 + num_top) * self.num_prompt_tokens > MAX_PROMPT_LOGPROBS:
            raise CannotFitError(
                f"prompt_logprobs is {num_top} and the prompt has {self.num_prompt_tokens} tokens; "
                f"at most {MAX_PROMPT_LOGPROBS} logprobs of a prompt are sent"
            )

    def admit(self, slot: int) -> None:
        """Give the sequence a slot: it is part of the next plan."""
        self.status = Status.RUNNING
        self.slot = slot
        self.scheduled_at = self.scheduled_at or monotonic()

    def phase_seconds(self) -> tuple[float, float]:
        """Return seconds in the queue and of the prefill; 0 before the first token."""
        if not self.scheduled_at or len(self.token_ids) == self.num_prompt_tokens:
            return 0.0, 0.0
        self.first_token_at = self.first_token_at or monotonic()
        return self.scheduled_at - self.arrived_at, self.first_token_at - self.scheduled_at

    def take_logprobs(self, packed: PackedLogprobs) -> None:
        """Append logprobs of its next token, unless it has ended."""
        if self.logprobs is not None and self.finish_reason is None:
            self.logprobs.append(packed)

    def take_prompt_logprobs(self, chunk: list[PackedLogprobs]) -> None:
        """Append logprobs of the next prompt tokens."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += chunk

    def is_requested_by(self, request: TokenizedRequest) -> bool:
        """Return whether `request` is for this output, of which it knows no more."""
        num_prompt_tokens = len(request.prompt_token_ids) // 4
        known = [*unpack(request.prompt_token_ids), *unpack(request.output_token_ids)]
        return (
            request.sampling == self.sampling
            and num_prompt_tokens == self.num_prompt_tokens
            and known == self.token_ids[: len(known)]
        )

    def as_row(self) -> RowAdded:
        """Return the row of the persistent batch, for the workers."""
        sampling = self.sampling
        return RowAdded(
            slot=self.slot,
            token_ids=pack(self.token_ids),
            block_ids=pack(self.block_table),
            num_computed_tokens=self.num_planned_tokens,
            temperature=sampling.temperature or 0.0,
            top_k=max(0, sampling.top_k or 0),
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            min_p=sampling.min_p or 0.0,
            seed=self.seed,
            extras=self._extras(),
        )

    def _extras(self) -> RowExtras | None:
        sampling, needs_prompt_logprobs = self.sampling, self.needs_prompt_logprobs
        extras = RowExtras(
            num_prompt_tokens=self.num_prompt_tokens,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            logit_bias=sampling.logit_bias,
            min_tokens=sampling.min_tokens,
            num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            num_prompt_logprobs=(sampling.prompt_logprobs or 0) if needs_prompt_logprobs else -1,
            structured_outputs=sampling.structured_outputs,
            allowed_token_ids=sampling.allowed_token_ids or [],
            bad_words=self.bad_words,
        )
        if extras == RowExtras(self.num_prompt_tokens):
            return None
        extras.end_token_ids = sorted(self.stop_token_ids)
        if sampling.structured_outputs:
            extras.reasoning = self.reasoning
        return extras


def seed_of(request: TokenizedRequest) -> int:
    """Return the requested seed, or one that follows from the request id, even after a restart."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return xxhash.xxh64_intdigest(request.request_id.encode()) >> 1
