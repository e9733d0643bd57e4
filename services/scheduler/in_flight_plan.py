"""What the scheduler notes of a plan while it is made, while it is in flight, and of its result."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from penstock.protocol.messages.plan import BLOCK_BITS, BatchPlan, RowAdded, SampledTokens, pack
from penstock.services.scheduler.sequence import Sequence


class Changes(NamedTuple):
    """The parts of a `BatchPlan` while it is being made."""

    added: list[RowAdded]
    appended: list[int]
    chunks: list[int]
    drafts: list[int]

    def append(self, slot: int, block: int) -> None:
        """A row gets a block."""
        self.appended.append(slot << BLOCK_BITS | block)

    def plan(self, epoch: int, number: int, removed: list[int]) -> BatchPlan:
        """As the workers get them."""
        appended, chunks, drafts = pack(self.appended), pack(self.chunks), pack(self.drafts)
        return BatchPlan(epoch, number, pack(removed), self.added, appended, chunks, drafts)


class Step(NamedTuple):
    """A plan in flight: what `update` must know of it."""

    number: int
    sampled: list[Sequence]
    """get one token each, in ascending order of slot; with guesses, one for each and one more"""
    chunks: dict[int, Sequence]
    """those with a chunk of prefill, by the slot that they had in this plan"""

    @property
    def computes(self) -> bool:
        """It is not empty."""
        return bool(self.sampled or self.chunks)

    @property
    def sequences(self) -> set[Sequence]:
        """All that the plan computes something of."""
        return {*self.sampled, *self.chunks.values()}

    def rows(
        self,
        token_ids: Iterable[int],
        failed: list[tuple[int, str]],
        fail: Callable[[Sequence, int, str], None],
    ) -> Iterable[tuple[Sequence, int]]:
        """Each row that was sampled, in order, with its token; `fail` gets those that can't go on.

        A row behind a wrong guess does not fail: it is void.
        """
        rows = zip(self.sampled, token_ids, strict=True)
        return _without_failed(rows, dict(failed), fail) if failed else rows

    def take_logprobs(self, tokens: SampledTokens) -> None:
        """Each goes to the sequence that asked for it; those of a row that failed are void."""
        failed = dict(tokens.failed)
        for index, packed in tokens.logprobs:
            if index not in failed:
                self.sampled[index].take_logprobs(packed)
        for slot, chunk in tokens.prompt_logprobs:
            self.chunks[slot].take_prompt_logprobs(chunk)


def _without_failed(
    rows: Iterable[tuple[Sequence, int]],
    reasons: dict[int, str],
    fail: Callable[[Sequence, int, str], None],
) -> Iterator[tuple[Sequence, int]]:
    for index, (sequence, token_id) in enumerate(rows):
        if index not in reasons:
            yield sequence, token_id
        elif sequence.finish_reason is None:
            speculation = sequence.speculation
            if speculation is None or speculation.takes():
                fail(sequence, token_id, reasons[index])


class StepOutput(NamedTuple):
    """What a step brought."""

    sequences: list[Sequence]
    token_ids: list[int]
    """one for each of `sequences`"""
    finished: list[Sequence]
    failed: list[tuple[Sequence, str]]
    """ended without a token, and why"""
