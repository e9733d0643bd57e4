"""The host tier of the prefix cache: the index of blocks in host memory, and their copies. No I/O.

A block is copied to the host before the pool gives the block to another sequence, and copied back
on a hit. Workers run all copies in the order of the index: `blocking` copies between two steps,
`overlapped` copies during the plan's step. So the index knows every slot's content without a reply.

A slot has the size of a KV block. A state block is larger: it is copied in pieces, each to a slot
of its own. The index handles pieces as it handles KV blocks.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.worker import CopyBlocks, FolderReport, FolderRequest
from penstock.services.scheduler.blocks.block_records import ROOT, BlockRecords, Content, recover
from penstock.services.scheduler.sequence import Sequence


class _Reading:
    """A file that all ranks are reading into a host slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.ranks = 0  # bit mask of ranks that have reported
        self.is_right = True


class FolderIndex:
    """The files of the folder tier, by prefix hash, as the ranks of one epoch report them."""

    def __init__(self, epoch: int, num_ranks: int) -> None:
        self.epoch = epoch
        self._all_ranks = (1 << num_ranks) - 1
        self._ranks: dict[bytes, int] = {}  # hash → bit mask of ranks that have the file
        self._reading: dict[bytes, _Reading] = {}
        # files that are being written: hash → bit mask of ranks that have reported
        self._writing: dict[bytes, int] = {}
        self._unlisted = self._all_ranks  # bit mask of ranks that have not listed their files

    def __contains__(self, hash_: bytes) -> bool:
        return self._ranks.get(hash_) == self._all_ranks

    @property
    def is_listed(self) -> bool:
        """True if all ranks have listed their files."""
        return not self._unlisted

    @property
    def slots(self) -> list[int]:
        """Host slots into which files are being read."""
        return [reading.slot for reading in self._reading.values()]

    def is_reading(self, hash_: bytes) -> bool:
        return hash_ in self._reading

    def read(self, hash_: bytes, slot: int) -> None:
        """Record that all ranks are requested to read a file."""
        self._reading[hash_] = _Reading(slot)

    @property
    def num_files(self) -> int:
        """Number of files that any rank has."""
        return len(self._ranks)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    def is_writing(self, hash_: bytes) -> bool:
        return hash_ in self._writing

    def write(self, hashes: Iterable[bytes]) -> None:
        """Record that all ranks are requested to write files."""
        for hash_ in hashes:
            self._writing.setdefault(hash_, 0)

    def remove(self, hash_: bytes) -> bool:
        """Forget a file that may be wrong. Return whether any rank may have the file."""
        if reading := self._reading.get(hash_):
            reading.is_right = False
        return self._ranks.pop(hash_, 0) != 0 or hash_ in self._writing

    def on_report(self, report: FolderReport) -> Iterator[tuple[bytes, int, bool]]:
        """Record a report. Yield (hash, slot, success) of each file that all ranks have read."""
        bit = 1 << report.rank
        self._unlisted &= ~(bit * report.is_listed)
        for hash_ in report.added:
            self._ranks[hash_] = self._ranks.get(hash_, 0) | bit
        self._on_written(bit, (*report.added, *report.unwritten))
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

    def _on_written(self, bit: int, hashes: Iterable[bytes]) -> None:
        """Record that a rank has written files, or never will."""
        for hash_ in hashes:
            if hash_ in self._writing:
                self._writing[hash_] |= bit
                if self._writing[hash_] == self._all_ranks:
                    del self._writing[hash_]


def _piece_key(hash_: bytes, index: int) -> bytes:
    """Return the key of a piece of the checkpoint after the prefix with this hash."""
    return sha256(b"state" + pack([index]) + hash_).digest()


@lru_cache(maxsize=1024)
def _piece_keys(hash_: bytes, number: int) -> list[bytes]:
    return [_piece_key(hash_, index) for index in range(number)]


class _Entry(NamedTuple):
    slot: int
    number: int  # unique number of the copy to this slot


class OffloadIndex:
    """The blocks in host slots, by prefix hash, least recently used first.

    Equal hashes mean equal prefixes (SHA-256), also after a restart of the scheduler. A copy is
    recorded when workers have confirmed it.
    """

    def __init__(
        self,
        num_slots: int,
        copies_per_step: int,
        memory_id: int = 0,
        records: BlockRecords | None = None,
        num_pieces: int = 0,
    ) -> None:
        """Make an index.

        copies_per_step: maximum number of copies that overlap a step. memory_id: id of the slots'
        memory. records: records of slots that workers have filled for earlier schedulers.
        num_pieces: number of slots that a state block takes.
        """
        self.num_pieces = num_pieces
        self.num_slots, self.memory_id = num_slots, memory_id
        self.copies_per_step = copies_per_step
        self.num_loaded = 0  # KV blocks that were copied back
        self._records = records
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._pins: Counter[bytes] = Counter()  # hashes that sequences load; their slots are kept
        self.own: set[bytes] = set()  # hashes of content that one sequence keeps; it gets no files
        self._discarded: set[bytes] = set()  # pinned hashes to `discard` when no pin is left
        self._loaded: list[bytes] = []  # hashes whose pins end with the current plan
        self._blocking: list[int] = []
        self._overlapped: list[int] = []
        # entries that the current plan copies to the host
        self._new: dict[bytes, _Entry] = {}
        self.folder: FolderIndex | None = None
        self._request = FolderRequest(0)  # the next request
        self.num_fetched = 0  # blocks that were read from files
        self._unsaved: list[bytes] = []  # hashes of content on the host that may have no file
        self._spare: set[bytes] = set()  # hashes of content that `save` has copied to the host
        # (number of a plan, entries that are certain once the plan is confirmed)
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
        """Number of blocks on the host."""
        return len(self._entries)

    def match(self, sequence: Sequence, hashes: list[bytes]) -> list[bytes] | None:
        """Return the leading hashes whose blocks are on the host.

        Return None if the sequence must wait, for files or for a sequence that loads the blocks.
        """
        found = self.find(hashes)
        pinned = filter(self._pins.__contains__, (hashes[0], hashes[-1]))
        awaited = [*pinned, *hashes[len(found) :][:1]]
        if awaited and self.is_awaited(awaited[0]):
            sequence.awaited = awaited[0]
            return None
        if self.folder and not sequence.has_fetched:
            sequence.has_fetched = True
            if self.fetch(hashes):
                return None
        return found

    @property
    def awaits_list(self) -> bool:
        """True if new workers have not listed their files yet."""
        return self.folder is not None and not self.folder.is_listed

    def is_awaited(self, hash_: bytes) -> bool:
        """Return whether a sequence that needs this block must wait for its copy or its file."""
        return hash_ in self._pins or (self.folder is not None and self.folder.is_reading(hash_))

    def pieces(self, block: int, hash_: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the place in `CopyBlocks` and the key of each piece of a state block.

        hash_: of the prefix before the checkpoint.
        """
        for index, key in enumerate(_piece_keys(hash_, self.num_pieces)):
            yield -1 - block * self.num_pieces - index, key

    def find(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Return the hashes of the longest prefix on the host."""
        return list(takewhile(self._entries.__contains__, hashes))

    def num_found(self, hashes: Iterable[bytes], in_files: bool) -> int:
        """Return the length of the longest prefix on the host or, if `in_files`, in the folder."""
        return sum(1 for _ in takewhile(partial(self._has, in_files), hashes))

    def has_checkpoint(self, hash_: bytes, in_files: bool) -> bool:
        """Return whether all pieces are on the host or, if `in_files`, in the folder."""
        if not self.num_pieces or not self._has(in_files, _piece_key(hash_, 0)):
            return False
        return all(self._has(in_files, key) for key in _piece_keys(hash_, self.num_pieces))

    def _has(self, in_files: bool, hash_: bytes) -> bool:
        """Return whether content is on the host, is being read or, if `in_files`, may be read."""
        if hash_ in self._entries or self.folder is None:
            return hash_ in self._entries
        return self.folder.is_reading(hash_) or (in_files and hash_ in self.folder)

    def store(self, block: int, hash_: bytes, overlapped: bool = False) -> bool:
        """Plan a copy of a block to the host, unless it is there or no slot can be freed.

        Return whether a copy is planned.
        """
        if hash_ in self._entries:
            self._entries.move_to_end(hash_)
        elif (slot := self._take_slot()) is not None:
            self._new[hash_] = self._enter(hash_, slot)
            (self._overlapped if overlapped else self._blocking).extend((block, slot))
            return True
        return False

    def _enter(self, hash_: bytes, slot: int) -> _Entry:
        self._num_copies += 1
        self._entries[hash_] = entry = _Entry(slot, self._num_copies)
        return entry

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Keep the slots of these hashes, which a sequence loads, until `load` or `unpin`."""
        for hash_ in hashes:
            self._pins[hash_] += 1
            self._entries.move_to_end(hash_)

    def unpin(self, hashes: Iterable[bytes]) -> None:
        for hash_ in hashes:
            self._pins[hash_] -= 1
            if not self._pins[hash_]:
                del self._pins[hash_]
                if hash_ in self._discarded:
                    self.discard([hash_])

    def load(self, hash_: bytes, block: int, overlapped: bool) -> None:
        """Plan a copy of a pinned slot into a block."""
        self.num_loaded += block >= 0
        self._loaded.append(hash_)
        copies = self._overlapped if overlapped else self._blocking
        copies.extend((block, -1 - self._entries[hash_].slot))

    def load_blocks(self, sequence: Sequence, overlapped: bool) -> None:
        """Plan copies of a sequence's blocks, if `overlapped` only as many as fit in the step."""
        while sequence.loads and (not overlapped or self.has_overlap_room):
            self.load(*sequence.loads.popleft(), overlapped)

    @property
    def has_copies(self) -> bool:
        """True if the current plan has copies."""
        return bool(self._blocking or self._overlapped)

    @property
    def has_overlap_room(self) -> bool:
        """True if more copies may overlap the step of the current plan."""
        return len(self._overlapped) < 2 * self.copies_per_step

    def flush(self, epoch: int, number: int) -> CopyBlocks | None:
        """Return the copies of a plan, or None if it has no copies.

        Copies that overlap a step have ended when the next step ends.
        """
        self.unpin(self._loaded)
        self._loaded.clear()
        if not self.has_copies:
            return None
        copies = CopyBlocks(epoch, pack(self._blocking), pack(self._overlapped))
        if self._new:
            self._uncertain.append((number + bool(self._overlapped), list(self._new.items())))
        if self.folder:
            by_slot = {entry.slot: hash_ for hash_, entry in self._new.items()}
            slots = [*self._blocking[1::2], *self._overlapped[1::2]]
            hashes = [by_slot[slot] for slot in slots if slot >= 0]
            copies.hashes = [b"" if hash_ in self.own else hash_ for hash_ in hashes]
            self.folder.write(filter(None, copies.hashes))
        self._blocking, self._overlapped, self._new = [], [], {}
        return copies

    def confirm(self, number: int) -> None:
        """Record that a plan has run, with its blocking and the previous overlapped copies."""
        while self._uncertain and self._uncertain[0][0] <= number:
            for hash_, entry in self._uncertain.popleft()[1]:
                if self._records and self._entries.get(hash_) == entry:
                    self._records.write(entry.slot, Content(entry.number, ROOT, hash_, b""))

    def lose(self) -> None:
        """Forget the copies of plans in flight after a worker failure."""
        new = [entry for _, entries in self._uncertain for entry in entries]
        for hash_, entry in (*new, *self._new.items()):
            if self._entries.get(hash_) == entry:
                del self._entries[hash_]
                self._free.append(entry.slot)
        for pending in (self._blocking, self._overlapped, self._loaded, self._uncertain):
            pending.clear()
        self._discarded.clear()
        self._new.clear()
        self._pins.clear()
        self.use_folder(None)

    # ---- the folder --------------------------------------------------------------------------

    def use_folder(self, folder: FolderIndex | None) -> None:
        """Use the files of a new worker group, which must list its files, or no files."""
        self._free += self.folder.slots if self.folder else []
        self._unsaved = list(self._entries)
        self.folder, self._request = folder, FolderRequest(0, lists=folder is not None)

    def fetch(self, hashes: list[bytes]) -> bool:
        """Request the longest prefix, as far as it is not on the host, from the folder.

        Return whether any file is requested.
        """
        slots = []
        for hash_ in hashes:
            if hash_ in self._entries:  # must not make room for the files
                self._entries.move_to_end(hash_)
        for hash_ in hashes:
            if hash_ in self._entries:
                continue
            if self.folder is None or hash_ not in self.folder:
                break
            if self.folder.is_reading(hash_) or (slot := self._take_slot()) is None:
                break
            self.folder.read(hash_, slot)
            self._request.fetched.append(hash_)
            slots.append(slot)
        self._request.slots += pack(slots)
        return bool(slots)

    def take_request(self, epoch: int) -> FolderRequest | None:
        """Return the request that workers must get after the plan, if any."""
        request = self._request
        # slots of this moment: a copy of the plan may have taken the slot of content to be written
        request.stored = [hash_ for hash_ in request.stored if hash_ in self._entries]
        request.stored_slots = pack(self._entries[hash_].slot for hash_ in request.stored)
        is_empty = not (request.fetched or request.stored or request.removed or request.lists)
        if self.folder is None or is_empty:
            return None
        self._request = FolderRequest(0)
        self.folder.write(request.stored)
        request.epoch = epoch
        return request

    def on_report(self, report: FolderReport) -> None:
        """Record the files that ranks have read or failed to read."""
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
        self._use_spare()

    @property
    def num_unsaved(self) -> int:
        """Number of files that are being written, or may have to be written from slots."""
        return len(self._unsaved) + (self.folder.num_writing if self.folder else 0)

    @property
    def may_save(self) -> bool:
        """True if more content may be written to files. The disk sets the pace."""
        if self.folder is None or not self.has_overlap_room:
            return False
        num_writing = self.folder.num_writing + len(self._request.stored)
        return num_writing < min(self.copies_per_step, -(-self.num_slots // 2))

    def save(self, block: int, hash_: bytes) -> None:
        """Plan to write content to a file, by way of a slot, unless there is a file.

        block: as in `store`; not needed for content on the host.
        """
        folder = self.folder
        if folder is None or hash_ in self.own or hash_ in folder or folder.is_writing(hash_):
            return
        if hash_ in self._entries:
            self._request.stored.append(hash_)
        elif self.store(block, hash_, overlapped=True):
            folder.write([hash_])
            self._spare.add(hash_)

    def save_slots(self) -> None:
        """Plan to write the content of slots for which an earlier worker may not have a file."""
        while self._unsaved and self.may_save:
            hash_ = self._unsaved.pop()
            if hash_ in self._entries:
                self.save(-1, hash_)

    def _use_spare(self) -> None:
        """Let content that was saved, and is in a block and a file, be evicted first."""
        for hash_ in list(self._spare):
            if self.folder is None or not self.folder.is_writing(hash_):
                self._spare.remove(hash_)
                if hash_ in self._entries and hash_ not in self._pins:
                    self._entries.move_to_end(hash_, last=False)

    def discard(self, hashes: Iterable[bytes]) -> None:
        """Forget content that is wrong or not needed, but what is pinned only when it is loaded."""
        for hash_ in hashes:
            self.own.discard(hash_)
            self._discarded.discard(hash_)
            if hash_ in self._pins:
                self._discarded.add(hash_)
            elif hash_ in self._entries and hash_ not in self._new:
                self._free.append(self._drop(hash_))
            if self.folder and self.folder.remove(hash_):
                self._request.removed.append(hash_)

    def _take_slot(self) -> int | None:
        """Return a free slot, or evict the least recently used content; None if all are in use."""
        if self._free:
            return self._free.pop()
        victims = (
            hash_ for hash_ in self._entries if hash_ not in self._pins and hash_ not in self._new
        )
        victim = next(victims, None)
        return None if victim is None else self._drop(victim)

    def _drop(self, hash_: bytes) -> int:
        """Forget content and return its slot, which may be overwritten from now on."""
        slot = self._entries.pop(hash_).slot
        if self._records:
            self._records.clear(slot)
        return slot
