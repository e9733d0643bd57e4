"""What the scheduler notes of a plan while it is made, while it is in flight, and of its result."""

from typing import NamedTuple

from penstock.protocol.plan import RowAdded
from penstock.services.scheduler.sequence import Sequence


class Changes(NamedTuple):
    """The parts of a `BatchPlan` while it is being made."""

    added: list[RowAdded]
    appended: list[int]
    chunks: list[int]


class Step(NamedTuple):
    """A plan in flight: what `update` must know of it."""

    number: int
    sampled: list[Sequence]
    """get one token each, in ascending order of slot"""
    chunks: list[tuple[Sequence, int]]
    """sequence and the number of its tokens computed behind this step"""

    @property
    def sequences(self) -> list[Sequence]:
        """All that the plan computes something of."""
        return [*self.sampled, *(sequence for sequence, _ in self.chunks)]


class StepOutput(NamedTuple):
    """What a step brought."""

    sequences: list[Sequence]
    token_ids: list[int]
    """one for each of `sequences`"""
    finished: list[Sequence]
