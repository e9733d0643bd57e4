"""Reference for the host tier: copies that run as late as they may, and void ones after a death."""

from penstock.protocol.messages.worker import CopyBlocks
from tests.services.scheduler.packed_plans import pairs

Cells = list[int | None]
GARBAGE = -1  # in a cell: no prefix has this number


class ReferenceHost:
    """Host slots of a worker, whose `memory` of blocks it shares.

    Copies beside a step run before the next one. Until then what they write is garbage, and it is
    asserted that what they read stays the same.
    """

    def __init__(self, memory: Cells, block_size: int, num_slots: int) -> None:
        self.memory = memory
        self._block_size = block_size
        self.slots: list[Cells] = [[None] * block_size] * num_slots
        self._beside: list[tuple[int, int]] = []
        """copies beside the last step"""
        self._sources: dict[int, Cells] = {}
        """content of blocks that they read"""
        self._written: list[list[tuple[int, int]]] = []
        """copies that ended in each plan"""

    def inherit(self, dead: "ReferenceHost", num_confirmed: int, is_whole: bool) -> None:
        """Take the slots of a dead worker; plans after `num_confirmed` may have run in part.

        is_whole: they have run.
        """
        self.slots = dead.slots
        if is_whole:
            for copy in dead._beside:
                self._copy(*copy)
            return
        for copies in (*dead._written[num_confirmed:], dead._beside):
            for block, slot in copies:
                if slot < 0:
                    self.memory[self._cells(block)] = self._garbage
                else:
                    self.slots[slot] = self._garbage

    def run(self, copies: CopyBlocks | None) -> None:
        """End the copies beside the last step, run those before the next one, begin others."""
        before = pairs(copies.before) if copies else []
        for block, slot in self._beside:
            if slot >= 0:
                assert self.memory[self._cells(block)] == self._sources[block], "a race"
        self._written.append([*self._beside, *before])
        for block, slot in self._written[-1]:
            self._copy(block, slot)
        self._beside = list(pairs(copies.beside)) if copies else []
        self._sources = {block: self.memory[self._cells(block)] for block, _ in self._beside}
        for block in self.loading:
            self.memory[self._cells(block)] = self._garbage

    @property
    def loading(self) -> set[int]:
        """Blocks that are written beside the step."""
        return {block for block, slot in self._beside if slot < 0}

    @property
    def _garbage(self) -> Cells:
        return [GARBAGE] * self._block_size

    def _cells(self, block: int) -> slice:
        return slice(block * self._block_size, (block + 1) * self._block_size)

    def _copy(self, block: int, slot: int) -> None:
        if slot >= 0:
            self.slots[slot] = self.memory[self._cells(block)]
        else:
            self.memory[self._cells(block)] = self.slots[-1 - slot]
