"""The host tier of the prefix cache: the blocks that lie in host memory, and their copies. No I/O.

Blocks go to the host before the pool gives them to another sequence, and are copied back on a hit.
Workers run all copies in the order of the index: those of `blocking` between two steps, those of
`overlapped` while the plan's step runs. So the index knows every slot's content without a reply.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.worker import CopyBlocks, FolderReport, FolderRequest
from penstock.services.scheduler.blocks.block_records import ROOT, BlockRecords, Content, recover
from penstock.services.scheduler.sequence import Sequence


class _Reading:
    """A file that ranks read into a host slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.ranks = 0  # bits of the ranks that have reported
        self.is_right = True


class FolderIndex:
    """Files by the hash of the whole prefix, as the ranks of one epoch report them."""

    def __init__(self, epoch: int, num_ranks: int) -> None:
        self.epoch = epoch
        self._all_ranks = (1 << num_ranks) - 1
        self._ranks: dict[bytes, int] = {}  # bits of the ranks that have a file
        self._reading: dict[bytes, _Reading] = {}

    def __contains__(self, hash_: bytes) -> bool:
        return self._ranks.get(hash_) == self._all_ranks

    @property
    def slots(self) -> list[int]:
        """Host slots into which files are read."""
        return [reading.slot for reading in self._reading.values()]

    def is_reading(self, hash_: bytes) -> bool:
        return hash_ in self._reading

    def read(self, hash_: bytes, slot: int) -> None:
        """Note that all ranks are requested to read a file."""
        self._reading[hash_] = _Reading(slot)

    def remove(self, hash_: bytes) -> bool:
        """Forget a file that may be wrong. Return whether any rank has it."""
        if reading := self._reading.get(hash_):
            reading.is_right = False
        return self._ranks.pop(hash_, 0) != 0

    def on_report(self, report: FolderReport) -> Iterator[tuple[bytes, int, bool]]:
        """Note a report; yield hash, slot and success of each file that all ranks have read."""
        bit = 1 << report.rank
        for hash_ in report.added:
            self._ranks[hash_] = self._ranks.get(hash_, 0) | bit
        for hash_ in (*report.removed, *report.failed):
            if (ranks := self._ranks.get(hash_, 0) & ~bit) == 0:
                self._ranks.pop(hash_, None)
            else:
                self._ranks[hash_] = ranks
        for is_right, hashes in ((True, report.fetched), (False, report.failed)):
            for hash_ in hashes:
                if reading := self._reading.get(hash_):
                    reading.ranks |= bit
                    reading.is_right &= is_right
                    if reading.ranks == self._all_ranks:
                        del self._reading[hash_]
                        yield hash_, reading.slot, reading.is_right


class _Entry(NamedTuple):
    slot: int
    number: int  # unique, of the copy that filled the slot


class OffloadIndex:
    """Blocks in host slots by the hash of the whole prefix, least recently used first.

    Equal hashes mean equal prefixes (SHA-256), also after a restart of the scheduler. A copy is
    certain, and recorded, when workers have confirmed it.
    """

    def __init__(
        self,
        num_slots: int,
        copies_per_step: int,
        memory_id: int = 0,
        records: BlockRecords | None = None,
    ) -> None:
        """Make an index; copies_per_step: maximum of copies that overlap a step.

        memory_id: of the slots. records: of the slots that earlier schedulers' workers have filled.
        """
        self.num_slots, self.memory_id = num_slots, memory_id
        self.copies_per_step = copies_per_step
        self.num_loaded = 0  # blocks that were copied back
        # a block of the plan that is built had to be copied before its step
        self.has_blocking_stores = False
        self._records = records
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._pins: Counter[bytes] = Counter()  # hashes that sequences load, whose slots stay
        self._loaded: list[bytes] = []  # hashes whose pins end with the plan that is built
        self._blocking: list[int] = []
        self._overlapped: list[int] = []
        # entries that the plan that is built copies to the host
        self._new: dict[bytes, _Entry] = {}
        self.folder: FolderIndex | None = None
        self._request = FolderRequest(0)  # the next one
        self.num_fetched = 0  # blocks that were read from files
        # (number of a plan; entries that are certain once it is confirmed)
        self._uncertain: deque[tuple[int, list[tuple[bytes, _Entry]]]] = deque()
        self._num_copies = ROOT
        for slot, content in recover(records) if records else ():
            if isinstance(content, Content):
                self._entries[content.hash] = _Entry(slot, content.number)
                self._num_copies = max(self._num_copies, content.number)
        used = {entry.slot for entry in self._entries.values()}
        self._free = [slot for slot in range(num_slots) if slot not in used]

    @property
    def num_blocks(self) -> int:
        """Blocks on the host."""
        return len(self._entries)

    def match(self, sequence: Sequence, hashes: list[bytes]) -> list[bytes] | None:
        """Return the first of these hashes, those of blocks that lie on the host.

        Return None if the sequence waits: for files, or for another sequence that loads the blocks.
        """
        if self.is_loading(hashes[0]):
            return None
        found = self.find(hashes)
        rest = hashes[len(found) :]
        if rest and self.folder and self.folder.is_reading(rest[0]):
            return None
        if self.folder and not sequence.has_fetched:
            sequence.has_fetched = True
            if self.fetch(rest):
                return None
        return found

    def find(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Return the hashes of the longest prefix that lies on the host."""
        return list(takewhile(self._entries.__contains__, hashes))

    def is_loading(self, hash_: bytes) -> bool:
        """Return whether a sequence loads this block, and publishes it soon."""
        return hash_ in self._pins

    def store(self, block: int, hash_: bytes, overlapped: bool = False) -> None:
        """Copy a block to the host, unless its content lies there or all slots are pinned."""
        if hash_ in self._entries:
            self._entries.move_to_end(hash_)
        elif (slot := self._take_slot()) is not None:
            self._new[hash_] = self._enter(hash_, slot)
            (self._overlapped if overlapped else self._blocking).extend((block, slot))
            self.has_blocking_stores |= not overlapped

    def _enter(self, hash_: bytes, slot: int) -> _Entry:
        self._num_copies += 1
        self._entries[hash_] = entry = _Entry(slot, self._num_copies)
        return entry

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Keep the slots of hashes that a sequence loads, until `load` or `unpin`."""
        for hash_ in hashes:
            self._pins[hash_] += 1
            self._entries.move_to_end(hash_)

    def unpin(self, hashes: Iterable[bytes]) -> None:
        for hash_ in hashes:
            self._pins[hash_] -= 1
            if not self._pins[hash_]:
                del self._pins[hash_]

    def load(self, hash_: bytes, block: int, overlapped: bool) -> None:
        """Copy a pinned slot into a block."""
        self.num_loaded += 1
        self._loaded.append(hash_)
        copies = self._overlapped if overlapped else self._blocking
        copies.extend((block, -1 - self._entries[hash_].slot))

    def load_blocks(self, sequence: Sequence, block_size: int, overlapped: bool) -> None:
        """Plan the copies of a sequence's blocks; overlapped: those for which the step has room."""
        num_loads = len(sequence.loads)
        begin = sequence.num_planned_tokens // block_size - num_loads
        for block in sequence.block_table[begin : begin + num_loads]:
            if overlapped and not self.has_overlap_room:
                break
            self.load(sequence.loads.popleft(), block, overlapped)

    @property
    def has_overlap_room(self) -> bool:
        """True if more copies may overlap the step of the plan that is built."""
        return len(self._overlapped) < 2 * self.copies_per_step

    def flush(self, epoch: int, number: int) -> CopyBlocks | None:
        """Return the copies of a plan, or None without any.

        Copies that overlap a step have ended when the next step has.
        """
        self.unpin(self._loaded)
        self._loaded.clear()
        if not self._blocking and not self._overlapped:
            return None
        copies = CopyBlocks(epoch, pack(self._blocking), pack(self._overlapped))
        if self._new:
            self._uncertain.append((number + bool(self._overlapped), list(self._new.items())))
        if self.folder:
            by_slot = {entry.slot: hash_ for hash_, entry in self._new.items()}
            slots = [*self._blocking[1::2], *self._overlapped[1::2]]
            copies.hashes = [by_slot[slot] for slot in slots if slot >= 0]
        self._blocking, self._overlapped, self._new, self.has_blocking_stores = [], [], {}, False
        return copies

    def confirm(self, number: int) -> None:
        """Note that workers have run a plan: its copies, and those that ran with the last one."""
        while self._uncertain and self._uncertain[0][0] <= number:
            for hash_, entry in self._uncertain.popleft()[1]:
                if self._records and self._entries.get(hash_) == entry:
                    self._records.write(entry.slot, Content(entry.number, ROOT, hash_, b""))

    def lose(self) -> None:
        """Forget the copies of plans in flight: the workers died."""
        new = [entry for _, entries in self._uncertain for entry in entries]
        for hash_, entry in (*new, *self._new.items()):
            if self._entries.get(hash_) == entry:
                del self._entries[hash_]
                self._free.append(entry.slot)
        for pending in (self._blocking, self._overlapped, self._loaded, self._uncertain):
            pending.clear()
        self._new.clear()
        self._pins.clear()
        self.use_folder(None)

    # ---- the folder --------------------------------------------------------------------------

    def use_folder(self, folder: FolderIndex | None) -> None:
        """Use the files of other workers, which are requested to list them, or none."""
        self._free += self.folder.slots if self.folder else []
        self.folder, self._request = folder, FolderRequest(0, lists=folder is not None)

    def fetch(self, hashes: Iterable[bytes]) -> bool:
        """Let the longest prefix in the folder be read; return whether any of it is."""
        slots = []
        for hash_ in hashes:
            if self.folder is None or hash_ not in self.folder or hash_ in self._entries:
                break
            if self.folder.is_reading(hash_) or (slot := self._take_slot()) is None:
                break
            self.folder.read(hash_, slot)
            self._request.fetched.append(hash_)
            slots.append(slot)
        self._request.slots += pack(slots)
        return bool(slots)

    def take_request(self, epoch: int) -> FolderRequest | None:
        """Return what workers must get after the plan, if anything."""
        request = self._request
        if self.folder is None or not (request.fetched or request.removed or request.lists):
            return None
        self._request = FolderRequest(0)
        request.epoch = epoch
        return request

    def on_report(self, report: FolderReport) -> None:
        """Note files that ranks have read or failed to read."""
        if self.folder is None or report.epoch != self.folder.epoch:
            return
        for hash_, slot, is_right in self.folder.on_report(report):
            if not is_right or hash_ in self._entries:
                self._free.append(slot)
                continue
            self.num_fetched += 1
            entry = self._enter(hash_, slot)
            if self._records:
                self._records.write(slot, Content(entry.number, ROOT, hash_, b""))

    def discard(self, hashes: Iterable[bytes]) -> None:
        """Forget content that may be wrong, unless a sequence loads it."""
        for hash_ in hashes:
            if hash_ in self._entries and hash_ not in self._pins and hash_ not in self._new:
                self._free.append(self._drop(hash_))
            if self.folder and self.folder.remove(hash_):
                self._request.removed.append(hash_)

    def _take_slot(self) -> int | None:
        """Return a free slot, or that of the content used least recently."""
        if self._free:
            return self._free.pop()
        victims = (
            hash_ for hash_ in self._entries if hash_ not in self._pins and hash_ not in self._new
        )
        victim = next(victims, None)
        return None if victim is None else self._drop(victim)

    def _drop(self, hash_: bytes) -> int:
        """Forget content; it may be overwritten from now on. Return its slot."""
        slot = self._entries.pop(hash_).slot
        if self._records:
            self._records.clear(slot)
        return slot
