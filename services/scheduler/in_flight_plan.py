"""Plans in flight: building them, their results, and their number."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import (
    BLOCK_BITS,
    BatchPlan,
    RowAdded,
    RowExtras,
    SampledTokens,
)
from penstock.protocol.messages.sampling import LOGITS_NUMBERS
from penstock.services.scheduler.sequence import Sequence

MIN_PLANS = 2  # minimum in flight; with fewer, the GPU waits for the host
# seconds from a step's end until a plan that follows from its tokens is launched, at the worst: 1.1
# ms between the processes at the 90th percentile, as sleeping threads wake late; 0.25 ms of launch
ROUND_TRIP = 2.5e-3


class InFlightPlan(NamedTuple):
    """A plan in flight, as `Scheduler.update` needs it."""

    number: int
    # rows that get a token, in ascending order of slot; a sequence with guesses has several
    sampled: list[Sequence]
    chunks: dict[int, Sequence]  # sequences with a chunk of prefill, by their slot in this plan
    chunk_ends: list[int]  # the position after each of `chunks`
    # blocks of these chunks that others may share, and the numbers of their content, uncertain
    # until the plan is confirmed
    published: list[tuple[int, int]]

    @property
    def computes(self) -> bool:
        return bool(self.sampled or self.chunks)

    @property
    def sequences(self) -> set[Sequence]:
        """All sequences that the plan computes tokens of."""
        return {*self.sampled, *self.chunks.values()}

    def rows(
        self,
        token_ids: Iterable[int],
        failed: list[tuple[int, str]],
        fail: Callable[[Sequence, int, str], None],
    ) -> Iterable[tuple[Sequence, int]]:
        """Yield each sampled row, in order, with its token; call `fail` for the failed ones.

        A row after a wrong guess does not fail: it is void.
        """
        rows = zip(self.sampled, token_ids, strict=True)
        return _without_failed(rows, dict(failed), fail) if failed else rows

    def add_outputs(self, tokens: SampledTokens) -> list[Sequence]:
        """Give each sequence its logprobs or pooled numbers; those of a failed row are void.

        Return the sequences that end with pooled numbers; their tokens are void.
        """
        failed = dict(tokens.failed)
        for index, packed in tokens.logprobs:
            if index not in failed:
                self.sampled[index].add_logprobs(packed)
        for slot, chunk in tokens.prompt_logprobs:
            self.chunks[slot].add_prompt_logprobs(chunk)
        return [
            self.sampled[index]
            for index, numbers in tokens.pooled
            if self.sampled[index].set_pooled(numbers)
        ]


class PlanBuilder:
    """A `BatchPlan` while it is made, and its `InFlightPlan`."""

    def __init__(self, number: int) -> None:
        self.plan = InFlightPlan(number, [], {}, [], [])
        self.added: list[RowAdded] = []
        self.drafts: list[int] = []
        self.appended: list[int] = []
        self._chunks: list[int] = []

    def append_block(self, slot: int, block: int) -> None:
        self.appended.append(slot << BLOCK_BITS | block)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Let a row compute the `num_tokens` before `num_planned_tokens`, of its prefill."""
        self._chunks.extend((sequence.slot, num_tokens))
        self.plan.chunks[sequence.slot] = sequence
        self.plan.chunk_ends.append(sequence.num_planned_tokens)

    def build(self, epoch: int, removed: list[int]) -> BatchPlan:
        appended, chunks, drafts = pack(self.appended), pack(self._chunks), pack(self.drafts)
        number = self.plan.number
        return BatchPlan(epoch, number, pack(removed), self.added, appended, chunks, drafts)


def row_of(sequence: Sequence) -> RowAdded:
    """Return the row of a sequence in the persistent batch, for the workers."""
    numbers = sequence.sampling.numbers()
    return RowAdded(
        slot=sequence.slot,
        token_ids=sequence.packed_token_ids(),
        block_ids=pack(sequence.block_table),
        num_computed_tokens=sequence.num_planned_tokens,
        sampling=numbers,
        seed=sequence.seed,
        extras=_extras(sequence, is_changed=not LOGITS_NUMBERS.keys().isdisjoint(numbers)),
    )


def _extras(sequence: Sequence, *, is_changed: bool) -> RowExtras | None:
    """Return the extras of a row, or None; is_changed: the row has LOGITS_NUMBERS."""
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
    rows: Iterable[tuple[Sequence, int]],
    reasons: dict[int, str],
    fail: Callable[[Sequence, int, str], None],
) -> Iterator[tuple[Sequence, int]]:
    for index, (sequence, token_id) in enumerate(rows):
        if index not in reasons:
            yield sequence, token_id
        elif sequence.finish_reason is None:
            lookup = sequence.ngram_lookup
            if lookup is None or lookup.accept_row():
                fail(sequence, token_id, reasons[index])


class PlanOutput(NamedTuple):
    """The result of a plan."""

    sequences: list[Sequence]
    token_ids: list[int]  # one for each of `sequences`
    finished: list[Sequence]
    failed: list[tuple[Sequence, str]]  # sequences that ended without a token, and the reason


class PlanDepth:
    """The number of plans that run during one round trip, from the rate of steps.

    A larger number would only make new requests wait longer for their first step.
    """

    def __init__(self, most: int) -> None:
        self.num_plans = min(MIN_PLANS, most)
        self._most = most
        self._last = -math.inf
        # between two steps; the median ignores one that is late
        self._seconds = deque([math.inf] * 3, maxlen=3)

    def on_tokens(self, now: float) -> None:
        """Note the tokens of a step; `now` in seconds."""
        self._seconds.append(now - self._last)
        self._last = now
        step = max(statistics.median(self._seconds), ROUND_TRIP / self._most)
        self.num_plans = min(max(1 + math.ceil(ROUND_TRIP / step), MIN_PLANS), self._most)
