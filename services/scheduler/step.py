"""What the scheduler notes of a plan while it is made, while it is in flight, and of its result."""

from typing import NamedTuple

from penstock.protocol.plan import BLOCK_BITS, BatchPlan, RowAdded, SampledTokens, pack
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

    def take_logprobs(self, tokens: SampledTokens) -> None:
        """Each goes to the sequence that asked for it."""
        for index, packed in tokens.logprobs:
            self.sampled[index].take_logprobs(packed)
        for slot, chunk in tokens.prompt_logprobs:
            self.chunks[slot].take_prompt_logprobs(chunk)


class StepOutput(NamedTuple):
    """What a step brought."""

    sequences: list[Sequence]
    token_ids: list[int]
    """one for each of `sequences`"""
    finished: list[Sequence]
    failed: list[tuple[Sequence, str]]
    """ended without a token, and why"""
