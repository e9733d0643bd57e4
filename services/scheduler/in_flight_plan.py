"""Plans in flight: how plans are built, their results, and the number of plans in flight."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from typing import NamedTuple

from penstock.protocol.messages.packed import PackedLogprobs, pack
from penstock.protocol.messages.plan import (
    BLOCK_BITS,
    BatchPlan,
    RowAdded,
    RowExtras,
    SampledTokens,
)
from penstock.protocol.messages.sampling import LOGITS_NUMBERS
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.step_costs import MANY, StepShape

MIN_PLANS = 2  # minimum number of plans in flight; with fewer, the GPU waits for the host
# Worst-case seconds from the end of a step to the launch of a plan that depends on its tokens: 1.1
# ms between the processes at the 90th percentile, as sleeping threads wake late; 0.25 ms of launch.
ROUND_TRIP = 2.5e-3
# Seconds of a step after which the next plan waits for its tokens: this costs 1 %, and what was
# aborted meanwhile is not computed.
LONG_STEP = 100 * ROUND_TRIP
SampledRow = tuple[Sequence, int, PackedLogprobs | None]  # with its token


class InFlightPlan(NamedTuple):
    """The scheduler's part of a plan in flight, for `Scheduler.update`."""

    number: int
    # sequence of each row that samples a token, by slot; a sequence with drafts has several rows
    sampled: list[Sequence]
    chunks: dict[int, Sequence]  # slot in this plan → sequence with a chunk of prefill
    chunk_ends: list[int]  # end position of each chunk, in the order of `chunks`
    # (published block of the chunks, number of its content); uncertain until the plan is confirmed
    published: list[tuple[int, int]]
    kept_states: list[tuple[int, int]]  # the same for state blocks with checkpoints
    shape: StepShape
    # drafts that the workers make after each token; if any, the next plan names them
    num_drafts: int = 0
    is_awaited: bool = False  # the next plan waits for the tokens

    @property
    def computes(self) -> bool:
        return bool(self.sampled or self.chunks)

    @property
    def sequences(self) -> set[Sequence]:
        """All sequences in the plan."""
        return {*self.sampled, *self.chunks.values()}

    def rows(
        self,
        token_ids: Iterable[int],
        tokens: SampledTokens,
        fail: Callable[[Sequence, int, str], None],
    ) -> Iterable[SampledRow]:
        """Yield each sampled row, in order. Call `fail` for each failed row.

        A row after a wrong draft is void and does not fail.
        """
        logprobs = map(dict(tokens.logprobs).get, count()) if tokens.logprobs else repeat(None)
        rows = zip(self.sampled, token_ids, logprobs, strict=False)
        return _without_failed(rows, dict(tokens.failed), fail) if tokens.failed else rows

    def add_outputs(self, tokens: SampledTokens, prompts: list[Sequence]) -> list[Sequence]:
        """Add prompt logprobs and pooled numbers to the sequences.

        Return the sequences that end with pooled numbers; their tokens are void. prompts: gets the
        sequences with new prompt logprobs.
        """
        for slot, chunk in tokens.prompt_logprobs:
            if self.chunks[slot].add_prompt_logprobs(chunk):
                prompts.append(self.chunks[slot])
        return [
            self.sampled[index]
            for index, numbers in tokens.pooled
            if self.sampled[index].set_pooled(numbers)
        ]


class PlanBuilder:
    """The builder of a `BatchPlan` and its `InFlightPlan`."""

    def __init__(self, number: int) -> None:
        self.plan = InFlightPlan(number, [], {}, [], [], [], StepShape())
        self.added: list[RowAdded] = []
        self.drafts: list[int] = []
        self.appended: list[int] = []
        # sequences whose prefill has too little time in the step; others may wait for their blocks
        self.cut: list[Sequence] = []
        self.limits = [MANY, MANY]  # tokens of short prompts, without and with rows of logits
        self.states: list[int] = []  # `BatchPlan.states`
        self._chunks: list[int] = []

    def is_long(self, sequence: Sequence, has_logits: bool = False) -> bool:
        """Return whether the prefill of a sequence has more tokens than that of a short prompt."""
        return len(sequence.token_ids) - sequence.prefill_begin > self.limits[has_logits]

    def append_block(self, slot: int, block: int) -> None:
        self.appended.append(slot << BLOCK_BITS | block)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a chunk of prefill: the `num_tokens` before the sequence's `num_planned_tokens`."""
        end, has_logits = sequence.num_planned_tokens, sequence.needs_prompt_logprobs
        self._chunks.extend((sequence.slot, num_tokens))
        self.plan.shape.add_chunk(end - num_tokens, end, has_logits)
        self.plan.chunks[sequence.slot] = sequence
        self.plan.chunk_ends.append(end)

    def build(self, epoch: int, removed: list[int], is_awaited: bool) -> BatchPlan:
        appended, chunks, drafts = pack(self.appended), pack(self._chunks), pack(self.drafts)
        parts = pack(removed), self.added, appended, chunks, drafts, pack(self.states)
        num_drafts = self.plan.num_drafts
        self.plan = self.plan._replace(is_awaited=is_awaited or num_drafts > 0)
        return BatchPlan(epoch, self.plan.number, *parts, num_drafts, self.plan.is_awaited)


def row_of(sequence: Sequence) -> RowAdded:
    """Return the message that adds a sequence to the workers' persistent batch."""
    numbers = sequence.sampling.numbers()
    extras = _extras(sequence, is_changed=not LOGITS_NUMBERS.keys().isdisjoint(numbers))
    num_skipped = 0 if extras else sequence.num_planned_tokens
    return RowAdded(
        slot=sequence.slot,
        token_ids=sequence.packed_token_ids(num_skipped),
        block_ids=pack(sequence.block_table),
        num_computed_tokens=sequence.num_planned_tokens,
        sampling=numbers,
        seed=sequence.seed,
        extras=extras,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_skipped=num_skipped,
    )


def _extras(sequence: Sequence, *, is_changed: bool) -> RowExtras | None:
    """Return the extras of a row, if any. `is_changed`: whether LOGITS_NUMBERS are set."""
    sampling, needs_prompt_logprobs = sequence.sampling, sequence.needs_prompt_logprobs
    extras = RowExtras(
        num_prompt_tokens=sequence.num_prompt_tokens,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        num_prompt_logprobs=(sampling.prompt_logprobs or 0) if needs_prompt_logprobs else -1,
        structured_outputs=sampling.structured_outputs,
        allowed_token_ids=sampling.allowed_token_ids or [],
        bad_words=sequence.bad_words,
        pooling=sequence.pooling,
    )
    if not is_changed and extras == RowExtras(sequence.num_prompt_tokens):
        return None
    extras.end_token_ids = sorted(sequence.stop_token_ids)
    if sampling.structured_outputs:
        extras.reasoning, extras.grammar = sequence.reasoning, sequence.grammar
    return extras


def _without_failed(
    rows: Iterable[SampledRow],
    reasons: dict[int, str],
    fail: Callable[[Sequence, int, str], None],
) -> Iterator[SampledRow]:
    for index, row in enumerate(rows):
        sequence, token_id, _ = row
        if index not in reasons:
            yield row
        elif sequence.finish_reason is None:
            proposer = sequence.proposer
            if proposer is None or proposer.accept_row():
                fail(sequence, token_id, reasons[index])


class PlanOutput(NamedTuple):
    """The result of a plan."""

    sequences: list[Sequence]
    token_ids: list[int]  # a token for each element of `sequences`
    finished: list[Sequence]
    failed: list[tuple[Sequence, str]]  # (failed sequence, reason)
    logprobs: dict[int, PackedLogprobs]  # index in `sequences` → logprobs of the token
    prompts: list[Sequence]  # sequences with new prompt logprobs
    is_step: bool = True  # False for an empty plan


class PlanDepth:
    """The number of plans in flight: as many as run during a round trip, at the rate of steps.

    A larger number would only make new requests wait longer for their first step. After a long step
    the number is 1.
    """

    def __init__(self, most: int) -> None:
        self.num_plans = min(MIN_PLANS, most)
        self._most = most
        self._last = -math.inf
        # seconds between steps; the median ignores a single late step
        self._seconds = deque([math.inf] * 3, maxlen=3)

    def on_tokens(self, now: float) -> None:
        """Record the arrival of a step's tokens at `now`, in seconds."""
        last = now - self._last
        self._seconds.append(last)
        self._last = now
        step = max(statistics.median(self._seconds), ROUND_TRIP / self._most)
        self.num_plans = min(max(1 + math.ceil(ROUND_TRIP / step), MIN_PLANS), self._most)
        if LONG_STEP <= last < math.inf:
            self.num_plans = 1
