"""Proposers of drafts for one sequence, and their drafts in flight.

A *draft* is an input token that is guessed before the step that would sample it. `NgramLookup`
finds drafts in the sequence itself; those of `LayerProposer` come with the sampled tokens, from the
workers' layer of multi-token prediction. Another proposer would implement the same three
methods, and `read` if it prepares the tokens.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence as Tokens

KNOWN = -1  # an input token that is not a draft: known now, or known once it is sampled


class Proposer(ABC):
    """The proposer of one sequence since its admission, and its drafts in flight."""

    def __init__(self, token_ids: list[int]) -> None:
        """Follow the list of the sequence's known tokens."""
        self.token_ids = token_ids
        # True if the worker has no next input token, or a wrong one: the next draft must name it
        self.is_paused = False
        # input tokens of the rows in flight, drafts or KNOWN; first the row of the prefill
        self._inputs = deque([KNOWN])
        self._num_void = 0  # void rows in flight before these, which follow a wrong draft

    def read(self, most: int) -> int:  # noqa: ARG002
        """Read up to `most` tokens that were not read yet, if needed. Return their number."""
        return 0

    @abstractmethod
    def num_drafts(self, has_row: bool) -> int:
        """Return how many drafts can be made now; has_row: no draft is in flight."""

    @abstractmethod
    def drafts(self, begin: int, end: int) -> list[int]:
        """Return drafts for the positions [begin, end), which come after the known tokens."""

    @abstractmethod
    def _learn(self, is_right: bool | None) -> None:
        """Learn of a new token, and whether its draft was right; None: it had no draft."""

    def accept_row(self) -> bool:
        """Remove the oldest row in flight. Return whether its token is valid, not void."""
        if self._num_void:
            self._num_void -= 1
            return False
        self._inputs.popleft()
        return True

    def check(self) -> bool | None:
        """Return whether the draft of a new token is right; None if the token had no draft.

        A wrong draft voids all later rows in flight.
        """
        draft = self._inputs[0] if self._inputs else KNOWN
        is_right = None if draft == KNOWN else draft == self.token_ids[-1]
        if is_right is False:
            self._num_void = len(self._inputs)
            self._inputs.clear()
        self._learn(is_right)
        return is_right

    def send(self, inputs: list[int]) -> None:
        """Record planned rows by their input tokens, drafts or KNOWN."""
        self._inputs.extend(inputs)
        self.is_paused = len(inputs) > 1


class LayerProposer(Proposer):
    """The drafts that the workers have made of one sequence, and how many of them were right."""

    # of the mean of the share of right drafts: weight of a draft, and value before the first
    WEIGHT, START = 1 / 16, 0.7
    MIN_CHANCE = 0.1  # that a draft is right with all before it, from the second one on

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        self.acceptance = self.START
        self._known = 0  # number of the sequence's tokens before `_drafts`
        self._drafts: Tokens[int] = ()

    def take(self, drafts: Tokens[int]) -> None:
        """Keep the drafts of the tokens after the known ones."""
        self._known, self._drafts = len(self.token_ids), drafts

    def num_drafts(self, has_row: bool) -> int:
        if not has_row or self._inputs or self._known != len(self.token_ids):
            return 0
        likely = math.log(self.MIN_CHANCE) / math.log(self.acceptance)  # neither 0 nor 1
        return min(len(self._drafts), max(1, int(likely)))

    def drafts(self, begin: int, end: int) -> list[int]:
        return [*self._drafts[: end - begin]]

    def _learn(self, is_right: bool | None) -> None:
        if is_right is not None:
            self.acceptance += self.WEIGHT * (is_right - self.acceptance)
