"""The pool of KV blocks, with the prefix cache."""

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice

from penstock.services.scheduler.blocks.block_records import (
    ROOT,
    BlockRecords,
    Content,
    RecoveredBlocks,
    recover,
)
from penstock.services.scheduler.blocks.offload_index import OffloadIndex


class BlockPool:
    """Reference counts, the free lists, and the prefix cache over `num_blocks` blocks.

    A free block keeps its content until the block is allocated again. Blocks without content are
    taken first, then others in order of last use. The last blocks of a sequence come before its
    first blocks. So a block is not evicted before the blocks that follow it. Every operation takes
    O(1) per block.
    """

    def __init__(self, num_blocks: int, records: BlockRecords | None = None) -> None:
        """Make a pool with the recorded blocks that workers computed for earlier schedulers."""
        self.capacity = self.num_blocks = num_blocks  # at most, and now
        self.num_reserved = 0  # state blocks that running sequences may need at any time
        # Of a pool that shares its memory with another (`Places`): called before a block is taken,
        # with a block that gets its first holder, and with one that loses the last; returns the
        # number of blocks that the other pool can give.
        self.before_take: Callable[[], object] = int
        self.on_hold: Callable[[int], object] = int
        self.on_free: Callable[[int], object] = int
        self.num_lent: Callable[[], int] = int
        self.clock = count(1)  # of releases
        self.run = 1  # blocks in a row that are for one long sequence, while there are others
        self.records = records
        self.offload: OffloadIndex | None = None  # index of the tier for evicted content
        # True if content must be copied to the host before the step of the current plan
        self._must_store = False
        self.has_states = False  # True if these are state blocks, which are copied in pieces
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self.used = array("q", bytes(8 * num_blocks))  # times of release; 0: not used yet
        self._contents: dict[int, Content] = {}
        self._cached: dict[bytes, int] = {}  # hash → block, for all `_contents`
        self._unsaved: dict[int, None] = {}  # blocks whose content may have no file
        self._num_contents = ROOT
        # free blocks: with nothing to lose, the next one last; and others, in order of last use
        self._empty = OrderedDict[int, None].fromkeys(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.num_released = 0  # blocks that became free
        found = recover(records) if records else []
        # blocks that an earlier scheduler has recorded and that were not taken or hidden since
        self.recovered = RecoveredBlocks(found, self._evictable) if found else None
        for block, record in found:
            del self._empty[block]
            self._evictable[block] = None
            if isinstance(record, Content):
                self.used[block] = next(self.clock)
                self._num_contents = max(self._num_contents, record.number)
                self._contents[block] = record
                self._cached[record.hash] = block
        self.forget_files()

    def emptied(self, memory_id: int) -> "BlockPool":
        """Return a pool of as many blocks in new memory, `BlockRecords.begin`'s `memory_id`."""
        if self.records:
            self.records.begin(memory_id)
        pool = BlockPool(self.capacity, self.records)
        pool.offload, pool.has_states = self.offload, self.has_states
        pool.num_released = self.num_released
        return pool

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without references; some of them may hold a cached prefix."""
        return self.num_own_free + self.num_lent()

    @property
    def num_own_free(self) -> int:
        """Number of free blocks without those that another pool can give."""
        return len(self._empty) + len(self._evictable)

    @property
    def next_used(self) -> float:
        """Time of the last use of the block that is evicted next; infinite without free blocks.

        0 if there is a free block with nothing to lose.
        """
        if self._empty or not self._evictable:
            return 0 if self._empty else math.inf
        return self.used[next(iter(self._evictable))]

    def free_blocks(self) -> Iterator[int]:
        """Return all free blocks, in the order of taking."""
        return chain(reversed(self._empty), self._evictable)

    def has_content(self, block: int) -> bool:
        """Return whether others may find the content of a block."""
        return block in self._contents

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Evict free blocks, and give their memory to another pool."""
        for block in blocks:
            self._evict(block)
            del self._empty[block]
            self.num_blocks -= 1

    def take_up(self, blocks: Iterable[int]) -> None:
        """Take up withdrawn blocks again."""
        for block in blocks:
            self._empty[block] = None
            self.num_blocks += 1

    def order_as(self, other: "BlockPool") -> None:
        """Let recovered contents have been used when those of `other` with their hashes were."""
        for block, content in self._contents.items():
            same = other._cached.get(content.hash, -1)
            self.used[block] = other.used[same] if same >= 0 else 0
        for block in sorted(self._evictable, key=self.used.__getitem__):
            self._evictable.move_to_end(block)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of the longest cached prefix. The caller must `share` them next.

        hashes: of the full blocks of a sequence, in order.
        """
        blocks: list[int] = []
        parent = ROOT
        for hash_ in hashes:
            block = self._cached.get(hash_, -1)
            if block < 0 or self._contents[block].parent != parent:
                break
            blocks.append(block)
            parent = self._contents[block].number
        return blocks

    def has(self, hash_: bytes) -> bool:
        """Return whether a full block is cached, whether the blocks before it are or not."""
        return hash_ in self._cached

    def adopt(self, block: int) -> None:
        """Take a free block whose first tokens are kept. Hide its content, as it will change."""
        self.hide([block])
        del self._empty[block]
        self._ref_counts[block] = 1
        self.on_hold(block)

    def num_free_without(self, matched: Sequence[int]) -> int:
        """Return the number of free blocks that remain after `share(matched)`."""
        return self.num_free_blocks - sum(not self._ref_counts[block] for block in matched)

    def share(self, matched: Sequence[int]) -> int:
        """Add a reference to each matched block. Return the number of the last block's content."""
        for block in matched:
            if not self._ref_counts[block]:
                del self._evictable[block]
                self.on_hold(block)
            self._ref_counts[block] += 1
        return self.last_number(matched)

    def last_number(self, matched: Sequence[int]) -> int:
        """Return the number of the last matched block's content; ROOT without blocks."""
        return self._contents[matched[-1]].number if matched else ROOT

    def holds(self, hash_: bytes, number: int) -> bool:
        """Return whether the cached content with this hash has this number."""
        block = self._cached.get(hash_)
        return block is not None and self._contents[block].number == number

    def may_be_written(self, block: int) -> bool:
        """Return whether a block has one holder and no content that others may find."""
        return block not in self._contents and self._ref_counts[block] == 1

    def take(self, table: Sequence[int] = ()) -> int:
        """Allocate a block and evict its content. Raises KeyError if no block is free.

        table: the sequence's blocks before it. A long sequence gets the next one if it is empty.
        """
        self.before_take()
        block = table[-1] + 1 if table else 0
        if block % self.run == 0 or block not in self._empty:
            block = self._begin_run(is_long=4 * len(table) >= self.run)
        self._evict(block)
        del self._empty[block]
        self._ref_counts[block] = 1
        self.on_hold(block)
        return block

    def _begin_run(self, is_long: bool) -> int:
        """Return the block to be taken next. Others get the rest of a long sequence's run last."""
        block = next(self.free_blocks(), -1)
        if block < 0:
            raise KeyError("no block is free")
        for following in range(block + 1, (block // self.run + 1) * self.run if is_long else 0):
            if following in self._empty:
                self._empty.move_to_end(following, last=False)
        return block

    def _evict(self, block: int) -> None:
        if content := self._contents.get(block):
            self._must_store |= self._store(block, content.hash)
        if content or self.recovered:
            self.hide([block])
        if self.records:
            self.records.clear(block)

    def store_ahead(self, offload: OffloadIndex) -> None:
        """If content was evicted, copy the next while the step runs, so that no step must wait."""
        num_next = 2 * offload.copies_per_step - len(self._empty)
        next_blocks = islice(self._evictable, max(num_next, 0) if self._must_store else 0)
        self._must_store = False
        for block in next_blocks:
            if not offload.has_overlap_room:
                break
            if content := self._contents.get(block):
                self._store(block, content.hash, overlapped=True)

    def _store(self, block: int, hash_: bytes, overlapped: bool = False) -> bool:
        """Plan copies of a block to the host, where they are missing. Return whether there are."""
        offload, copies = self.offload, self._copies(block, hash_)
        return bool(offload and sum(offload.store(*copy, overlapped) for copy in copies))

    def _copies(self, block: int, hash_: bytes) -> Iterable[tuple[int, bytes]]:
        """Return the block's number and hash, or those of its pieces."""
        if self.offload and self.has_states:
            return self.offload.pieces(block, hash_)
        return [(block, hash_)]

    @property
    def num_unsaved(self) -> int:
        """Number of blocks whose content may have to be written to a file."""
        return len(self._unsaved)

    def forget_files(self) -> None:
        """Assume that no content has a file."""
        self._unsaved = dict.fromkeys(self._contents)

    def save(self) -> None:
        """Plan to write content without a file, oldest first, as fast as the disk takes it."""
        while self._unsaved and self.offload and self.offload.may_save:
            block = next(iter(self._unsaved))
            del self._unsaved[block]
            for place, key in self._copies(block, self._contents[block].hash):
                self.offload.save(place, key)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a block table."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self.num_released += 1
                self.used[block] = next(self.clock)
                (self._evictable if block in self._contents else self._empty)[block] = None
                self.on_free(block)

    def publish(self, block: int, parent: int, hash_: bytes, token_ids: bytes) -> int:
        """Publish a full block to other sequences. Return the number of its content.

        If an equal block is already published, return the number of that block's content; `block`
        stays private. An equal block after another content is replaced: it can't be found, as its
        parent was evicted or hidden.
        """
        old_block = self._cached.get(hash_)
        if old_block is not None:
            if self._contents[old_block].parent == parent:
                return self._contents[old_block].number
            self.hide([old_block])
        self._num_contents += 1
        self._contents[block] = Content(self._num_contents, parent, hash_, token_ids)
        self._cached[hash_] = block
        self._unsaved[block] = None
        return self._num_contents

    def publish_own(self, blocks: Iterable[int], parent: int, hashes: Iterable[bytes]) -> None:
        """Publish blocks, as if they were full, by random hashes. They get no files."""
        for block, hash_ in zip(blocks, hashes, strict=True):
            parent = self.publish(block, parent, hash_, b"")
            if self.offload:
                self.offload.own.update(key for _, key in self._copies(block, hash_))

    def unpublish(self, hashes: Iterable[bytes]) -> None:
        """Hide the blocks with these hashes. Sequences keep hidden blocks in their tables."""
        hashes = list(hashes)
        self.hide(self._cached[hash_] for hash_ in hashes if hash_ in self._cached)
        if self.offload:
            self.offload.discard(key for hash_ in hashes for _, key in self._copies(0, hash_))

    def hide(self, blocks: Iterable[int]) -> None:
        """Hide blocks, published or not. Sequences keep hidden blocks in their tables."""
        for block in blocks:
            if self.recovered:
                self.recovered.remove(block)
            if content := self._contents.pop(block, None):
                del self._cached[content.hash]
                self._unsaved.pop(block, None)
                if self.records:
                    self.records.clear(block)
            if block in self._evictable:
                del self._evictable[block]
                self._empty[block] = None

    def confirm(self, published: Iterable[tuple[int, int]]) -> None:
        """Record the computed blocks in `published`: (block, number of its content)."""
        for block, number in published:
            content = self._contents.get(block)
            if self.records and content and content.number == number:
                self.records.write(block, content)
