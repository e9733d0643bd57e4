"""Requests that kill workers, found among those that ran when workers died.

One death tells nothing of who caused it. A request at `MAX_DEATHS` of them in a row, without a
token between them, is given up. Before the last one it is a suspect, and the scheduler runs
suspects one at a time, each until its first token: so those that only ran beside the cause are
cleared.
"""

from collections.abc import Iterable

from penstock.services.scheduler.sequence import Sequence

MAX_DEATHS = 3
"""of workers in a row that a request may be at without a token in between"""
GIVEN_UP = (
    f"the workers died {MAX_DEATHS} times in a row while the request ran, each time before it got "
    "another token; it is not tried again"
)
"""what its client is told"""


def is_suspect(sequence: Sequence) -> bool:
    """Whether the next death would be its last."""
    return sequence.num_deaths >= MAX_DEATHS - 1


def count_death(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The workers died with `sequences` in flight; returns those that are given up."""
    given_up = []
    for sequence in sequences:
        sequence.num_deaths += 1
        if sequence.num_deaths >= MAX_DEATHS and sequence.finish_reason is None:
            given_up.append(sequence)
    return given_up
