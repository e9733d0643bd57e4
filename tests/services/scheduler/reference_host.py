"""Reference for the host tier: copies that run as late as they may, and void ones after a death."""

from collections import deque
from collections.abc import Container

from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.worker import CopyBlocks, FolderReport, FolderRequest
from penstock.services.scheduler.scheduler import Scheduler
from tests.services.scheduler.packed_plans import pairs
from tests.services.scheduler.reference_states import Piece, ReferenceStates

Cells = list[int | None]
Copied = Cells | Piece
"""Content of a slot"""
GARBAGE = -1  # in a cell: no prefix has this number


class ReferenceHost:
    """Host slots of a worker, whose `memory` of blocks and whose state blocks it shares.

    Copies that overlap a step run before the next one. Until then what they write is garbage, and
    it is asserted that what they read stays the same.
    """

    def __init__(
        self, memory: Cells, block_size: int, states: ReferenceStates, num_pieces: int
    ) -> None:
        """Make a host with one slot; num_pieces: slots of a state block."""
        self.memory = memory
        self.cells_per_state = 0  # cells in whose place a state block lies; 0: it has its own
        self._block_size = block_size
        self._states, self._num_pieces = states, num_pieces
        self.slots: list[Copied] = [[None] * block_size]
        self._overlapped: list[tuple[int, int]] = []
        """copies that overlap the last step"""
        self._sources: dict[int, Copied] = {}
        """content of blocks that they read"""
        self._written: list[list[tuple[int, int]]] = []
        """copies that ended in each plan"""
        self.files: dict[bytes, Copied] = {}
        self._hashes: dict[int, bytes] = {}
        """of slots that are written during the last step"""
        self._added: list[bytes] = []
        self.requests: deque[FolderRequest] = deque()
        self._ended: list[tuple[int, int]] = []
        """copies that overlapped the last step and have ended since"""
        self._stored: dict[bytes, Copied] = {}
        """content of slots to write to files"""

    def inherit(self, dead: "ReferenceHost", num_confirmed: int, is_whole: bool) -> None:
        """Take the slots of a dead worker; plans after `num_confirmed` may have run in part.

        is_whole: they have run.
        """
        self.slots, self.files = dead.slots, dead.files
        if is_whole:
            for copy in dead._overlapped:
                self._copy(*copy)
            return
        for copies in (*dead._written[num_confirmed:], dead._overlapped, dead._ended):
            for block, slot in copies:
                if slot < 0:
                    self._put(block, self._garbage)
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
                assert self._get(block) == self._sources[block], "a race"
        self._written.append([*self._overlapped, *self._ended, *blocking])
        self._ended = []
        for block, slot in self._overlapped:
            self._copy(block, slot)
            self._write(slot, self._hashes)
        for block, slot in blocking:
            self._copy(block, slot)
            self._write(slot, found)
        self._overlapped, self._hashes = list(overlapped), found
        self._sources = {block: self._get(block) for block, _ in self._overlapped}
        for block in self.loading:
            self._put(block, self._garbage)

    def _write(self, slot: int, hashes: dict[int, bytes]) -> None:
        if hash_ := hashes.get(slot):
            self.files[hash_] = self.slots[slot]
            self._added.append(hash_)

    def take_request(self, scheduler: Scheduler) -> None:
        """Take what the scheduler sends after a plan, or without one."""
        if request := scheduler.block_manager.take_folder_request(scheduler.epoch):
            self.requests.append(request)
            slots = unpack(request.stored_slots)
            for hash_, slot in zip(request.stored, slots, strict=True):
                self._stored[hash_] = self.slots[slot]

    def end_stores(self, slots: Container[int] | None = None) -> None:
        """End copies to the host that overlap the last step; slots: only of these."""
        stores = [
            (block, slot)
            for block, slot in self._overlapped
            if slot >= 0 and (slots is None or slot in slots)
        ]
        self._overlapped = [copy for copy in self._overlapped if copy not in stores]
        for block, slot in stores:
            self._copy(block, slot)
            self._write(slot, self._hashes)
        self._ended += stores

    def answer(self, scheduler: Scheduler, fails: bool) -> bool:
        """Do what the oldest request says, if any; fails: every other file is damaged."""
        if not self.requests and not self._added and not scheduler.in_flight:
            self.end_stores()
        if not self.requests and not self._added:
            return False
        request = self.requests.popleft() if self.requests else FolderRequest(scheduler.epoch)
        assert request.epoch == scheduler.epoch
        added = list(self.files) if request.lists else self._added
        report = FolderReport(scheduler.epoch, 0, added, is_listed=request.lists)
        self._added = []
        for hash_ in request.removed:
            self.files.pop(hash_, None)
        for index, hash_ in enumerate(request.stored):
            if fails and index % 2:
                report.unwritten.append(hash_)
            else:
                self.files.setdefault(hash_, self._stored[hash_])
                report.added.append(hash_)
        slots = unpack(request.slots)
        self.end_stores(set(slots))  # as `KvFolder.fetch` waits for copies that use a slot
        for copies in (self._ended, *self._written):
            copies[:] = [copy for copy in copies if copy[1] not in slots]
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

    def _get(self, block: int) -> Copied:
        """Return the content of a block, or of a piece of a state block."""
        if block >= 0:
            return self.memory[self._cells(block)]
        state, index = divmod(-1 - block, self._num_pieces)
        return self._states.blocks[state], index

    def _put(self, block: int, content: Copied) -> None:
        if block >= 0:
            assert isinstance(content, list), "a piece of a state is copied to a KV block"
            self.memory[self._cells(block)] = content
            self.spoil_state(block * self._block_size)
            return
        state, index = divmod(-1 - block, self._num_pieces)
        piece = (None, index) if isinstance(content, list) else content
        self._states.load(state, index, piece, self._num_pieces)
        self.spoil_cells(state)

    def spoil_state(self, cell: int) -> None:
        """Lose the state in whose place a cell was written."""
        if self.cells_per_state:
            self._states.spoil(cell // self.cells_per_state)

    def spoil_cells(self, state: int) -> None:
        """Lose the cells in whose place a state was written."""
        for cell in range(state * self.cells_per_state, (state + 1) * self.cells_per_state):
            self.memory[cell] = GARBAGE

    def _copy(self, block: int, slot: int) -> None:
        if slot >= 0:
            self.slots[slot] = self._get(block)
        else:
            self._put(block, self.slots[-1 - slot])
