"""Reference for the host tier: copies that run as late as they may, and void ones after a death."""

from collections import deque

from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.worker import CopyBlocks, FolderReport, FolderRequest
from penstock.services.scheduler.scheduler import Scheduler
from tests.services.scheduler.packed_plans import pairs

Cells = list[int | None]
GARBAGE = -1  # in a cell: no prefix has this number


class ReferenceHost:
    """Host slots of a worker, whose `memory` of blocks it shares.

    Copies that overlap a step run before the next one. Until then what they write is garbage, and
    it is asserted that what they read stays the same.
    """

    def __init__(self, memory: Cells, block_size: int) -> None:
        """Make a host with one slot."""
        self.memory = memory
        self._block_size = block_size
        self.slots: list[Cells] = [[None] * block_size]
        self._overlapped: list[tuple[int, int]] = []
        """copies that overlap the last step"""
        self._sources: dict[int, Cells] = {}
        """content of blocks that they read"""
        self._written: list[list[tuple[int, int]]] = []
        """copies that ended in each plan"""
        self.files: dict[bytes, Cells] = {}
        self._hashes: dict[int, bytes] = {}
        """of slots that are written during the last step"""
        self._added: list[bytes] = []
        self.requests: deque[FolderRequest] = deque()

    def inherit(self, dead: "ReferenceHost", num_confirmed: int, is_whole: bool) -> None:
        """Take the slots of a dead worker; plans after `num_confirmed` may have run in part.

        is_whole: they have run.
        """
        self.slots, self.files = dead.slots, dead.files
        if is_whole:
            for copy in dead._overlapped:
                self._copy(*copy)
            return
        for copies in (*dead._written[num_confirmed:], dead._overlapped):
            for block, slot in copies:
                if slot < 0:
                    self.memory[self._cells(block)] = self._garbage
                else:
                    self.slots[slot] = self._garbage

    def run(self, copies: CopyBlocks | None) -> None:
        """End the copies of the last step, run those before the next one, begin others."""
        blocking = pairs(copies.blocking) if copies else []
        overlapped = pairs(copies.overlapped) if copies else []
        hashes = iter(copies.hashes if copies else [])
        found = {slot: next(hashes, b"") for _, slot in [*blocking, *overlapped] if slot >= 0}
        for block, slot in self._overlapped:
            if slot >= 0:
                assert self.memory[self._cells(block)] == self._sources[block], "a race"
        self._written.append([*self._overlapped, *blocking])
        for block, slot in self._overlapped:
            self._copy(block, slot)
            self._write(slot, self._hashes)
        for block, slot in blocking:
            self._copy(block, slot)
            self._write(slot, found)
        self._overlapped, self._hashes = list(overlapped), found
        self._sources = {block: self.memory[self._cells(block)] for block, _ in self._overlapped}
        for block in self.loading:
            self.memory[self._cells(block)] = self._garbage

    def _write(self, slot: int, hashes: dict[int, bytes]) -> None:
        if hash_ := hashes.get(slot):
            self.files[hash_] = self.slots[slot]
            self._added.append(hash_)

    def take_request(self, scheduler: Scheduler) -> None:
        """Take what the scheduler sends after a plan, or without one."""
        if request := scheduler.block_manager.take_folder_request(scheduler.epoch):
            self.requests.append(request)

    def answer(self, scheduler: Scheduler, fails: bool) -> bool:
        """Do what the oldest request says, if any; fails: every other file is damaged."""
        if not self.requests and not self._added:
            return False
        request = self.requests.popleft() if self.requests else FolderRequest(scheduler.epoch)
        assert request.epoch == scheduler.epoch
        added = list(self.files) if request.lists else self._added
        report = FolderReport(scheduler.epoch, 0, added)
        self._added = []
        for hash_ in request.removed:
            self.files.pop(hash_, None)
        slots = unpack(request.slots)
        for index, (hash_, slot) in enumerate(zip(request.fetched, slots, strict=True)):
            if hash_ in self.files and not (fails and index % 2):
                self.slots[slot] = self.files[hash_]
                report.fetched.append(hash_)
            else:
                self.files.pop(hash_, None)
                self.slots[slot] = self._garbage
                report.failed.append(hash_)
        scheduler.block_manager.on_report(report)
        return True

    @property
    def loading(self) -> set[int]:
        """Blocks that are written during the step."""
        return {block for block, slot in self._overlapped if slot < 0}

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
