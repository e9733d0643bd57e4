"""State blocks of the reference worker: each knows the exact prefixes whose state it has."""

from random import Random
from typing import NamedTuple

from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import STATE_WINDOW, BatchPlan


class StateContent(NamedTuple):
    """The state after `first` tokens, and after each further token of its window."""

    first: int
    prefixes: list[int]  # number of the prefix of `first` tokens, then of each longer prefix

    @property
    def last(self) -> int:
        return self.first + len(self.prefixes) - 1


Piece = tuple[StateContent | None, int]
"""A part of a content, with its index"""


class ReferenceStates:
    """State blocks, written as `penstock.kernels.layouts.states` says."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[StateContent | None] = [None] * num_blocks
        self._loaded: list[dict[int, Piece]] = [{} for _ in range(num_blocks)]
        """pieces that were copied to each block since it was written"""
        self._pairs: dict[int, tuple[int, int]] = {}
        """slot → blocks that its next step reads and writes"""
        self._before: list[list[StateContent | None]] = []
        """all blocks before each plan"""
        self._read: set[int] = set()
        self._written: set[int] = set()
        """blocks that rows of the current plan read and write"""

    def begin(self, plan: BatchPlan) -> None:
        self._before.append(list(self.blocks))
        self._read, self._written = set(), set()
        for slot in [*unpack(plan.removed), *(row.slot for row in plan.added)]:
            self._pairs.pop(slot, None)
        numbers = iter(unpack(plan.states))
        for slot, read, written in zip(numbers, numbers, numbers, strict=True):
            self._pairs[slot] = read, written

    def step(self, slot: int, start: int, prefixes: list[int], decodes: bool) -> int:
        """Compute the tokens from `start`; prefixes: numbers of all prefixes up to the last.

        Return the block that is written; -1 without state blocks.
        """
        if not self.blocks:
            return -1
        numbers = [0, *prefixes]
        read, written = self._pairs[slot]
        if read < 0:
            assert start == 0, "a sequence begins with the wrong state"
        else:
            content = self.blocks[read]
            assert content, "the state that is read was never written"
            assert content.first <= start <= content.last, "the state is of another position"
            assert content.prefixes[start - content.first] == numbers[start], "of another prefix"
        assert written not in self._written, "two rows write a state block"
        self._read.add(read)
        self._written.add(written)
        first = start if decodes else len(prefixes)
        assert not decodes or len(prefixes) - start <= STATE_WINDOW
        self.blocks[written] = StateContent(first, numbers[first:])
        self._loaded[written] = {}
        self._pairs[slot] = written, read
        return written

    def spoil(self, block: int) -> None:
        """Lose a block's state, as something else was written to its memory."""
        self.blocks[block] = None
        self._loaded[block] = {}

    def end(self, spoiled: set[int]) -> None:
        """End a plan; spoiled: blocks that lie where the plan has written something else."""
        assert not self._read & self._written, "a row reads what another row writes"
        assert not spoiled & (self._read | self._written), "KV and a state in one place"

    def inherit(self, dead: "ReferenceStates", num_confirmed: int, is_whole: bool) -> None:
        """Take the blocks of a dead worker, as `ReferenceWorker.inherit` does.

        Some plans have run, one in part, later ones have not.
        """
        self.blocks = list(dead.blocks)
        number = num_confirmed + Random(len(dead._before)).randrange(4)
        if is_whole or number >= len(dead._before):
            return
        after = [*dead._before, dead.blocks][number + 1]
        self.blocks = [
            old if old is new else None
            for old, new in zip(dead._before[number], after, strict=True)
        ]

    def load(self, block: int, index: int, piece: Piece, num_pieces: int) -> None:
        """Copy a piece to a block, which has a state when all pieces are of the same state."""
        pieces = self._loaded[block]
        pieces[index] = piece
        content, _ = piece
        is_whole = all(pieces.get(n) == (content, n) for n in range(num_pieces))
        self.blocks[block] = content if is_whole else None

    def ranges(self) -> list[tuple[int, int]]:
        """Return what `WorkerGroup.state_ranges` would tell."""
        return [(block.first, block.last) if block else (-1, -1) for block in self.blocks]
