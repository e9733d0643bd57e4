"""Requests that kill workers, found among those that ran when workers died.

One death tells nothing of who caused it. A request that was in flight at `MAX_DEATHS` - 1 of them
in a row, without a token between them, is a suspect, and runs alone until its next token: others
are preempted. If the workers die of it, nothing else can be the cause, and it is given up; those
that only ran beside the cause get their token and are cleared.
"""

from collections.abc import Collection

from penstock.services.scheduler.in_flight_plan import Step
from penstock.services.scheduler.sequence import Sequence, Status

_, RUNNING, DRAINING, _ = Status
MAX_DEATHS = 3
"""of workers in a row that a request may be at without a token in between"""
GIVEN_UP = (
    f"the workers died {MAX_DEATHS} times in a row while the request ran, each time before it got "
    "another token; it is not tried again"
)
"""what its client is told"""


class Trial:
    """The suspect that runs, and keeps all others out of the running batch."""

    def __init__(self, running: Collection[Sequence], in_flight: Collection[Step]) -> None:
        """Both change while the scheduler works."""
        self._running, self._in_flight = running, in_flight
        self._suspect: Sequence | None = None

    @property
    def is_on(self) -> bool:
        """Until the suspect gets a token, ends or is preempted."""
        one = self._suspect
        return one is not None and is_suspect(one) and one.status in (RUNNING, DRAINING)

    def admitted(self, sequence: Sequence) -> None:
        """If it is a suspect, its trial begins."""
        if is_suspect(sequence):
            self._suspect = sequence

    def keeps_out(self, sequence: Sequence) -> bool:
        """Whether `sequence` may not be admitted: another one is on trial, or it is a suspect and
        not all plans with others are back."""
        if self.is_on or not is_suspect(sequence):
            return self.is_on
        return bool(self._running) or any(step.computes for step in self._in_flight)


def is_suspect(sequence: Sequence) -> bool:
    """Whether it is to run alone: the next death would be its last."""
    return sequence.num_deaths >= MAX_DEATHS - 1


def count_death(in_flight: Collection[Sequence]) -> list[Sequence]:
    """Counts a death of the workers; returns the sequence that is given up, if it is a suspect and
    was alone in flight. One that was aborted meanwhile is given up, too."""
    guilty = [one for one in in_flight if is_suspect(one) and len(in_flight) == 1]
    for sequence in in_flight:
        most = MAX_DEATHS if sequence in guilty else MAX_DEATHS - 1
        sequence.num_deaths = min(sequence.num_deaths + 1, most)
    return [one for one in guilty if one.finish_reason in (None, "abort")]
