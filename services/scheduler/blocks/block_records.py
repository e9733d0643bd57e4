"""Records of the cached blocks, in memory that outlives the scheduler.

Only content that a step's result has confirmed is recorded. A record is cleared before its block
may be written to. So the records of a killed scheduler are correct as long as the workers have the
same KV memory. A record is valid if its number is not 0; the number is written last, by one store.
The record of a partly filled block has a negative number, and grows by one store per token.
"""

import logging
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from hashlib import sha256
from itertools import takewhile
from mmap import mmap
from operator import itemgetter
from typing import NamedTuple, Self

from penstock.protocol.messages.packed import pack, unpack
from penstock.protocol.transport.socket_pairs import MemoryClient

log = logging.getLogger(__name__)

HASH_BYTES = 32
ROOT = 0  # the parent of the first block of every sequence


class Content(NamedTuple):
    """The content of a published block.

    `number` is unique; `parent` is the number of the preceding content. So equal numbers mean that
    the content was computed from the same contents.
    """

    number: int
    parent: int
    hash: bytes
    token_ids: bytes


class Tail(NamedTuple):
    """The confirmed content of a partly filled block.

    `parent` is the number of the preceding content, `hash` its chained hash with no tokens added.
    """

    parent: int
    hash: bytes
    token_ids: bytes


Recorded = list[tuple[int, Content | Tail]]  # blocks with their content


def hash_root(cache_salt: str) -> bytes:
    """Return the parent hash of a first block. No salt can produce another block's hash."""
    return sha256(b"salt:" + cache_salt.encode()).digest()


def hash_block(parent: bytes, token_ids: bytes) -> bytes:
    """Return the chained hash of a prefix, its key in the pool and in all tiers.

    Equal hashes mean equal salts and tokens, in all processes and at all times (SHA-256).
    parent: `hash_root`, or the hash of the preceding block.
    """
    return sha256(b"block" + parent + token_ids).digest()


class BlockRecords:
    """A record per block: int64 number and parent, hash, and int32 token ids.

    The number of a tail is -1 - `parent`. Its token ids are stored plus 1, with a 0 at the end.
    """

    def __init__(self, memory: mmap | bytearray, num_blocks: int, block_size: int) -> None:
        """Map `memory` of `size_of` bytes, zeros or the records of an earlier scheduler."""
        self._bytes = view = memoryview(memory)
        self._bodies = 8 + 16 * num_blocks
        self._memory_id = view[:8].cast("q")
        self._numbers = view[8 : 8 + 8 * num_blocks].cast("q")
        self._parents = view[8 + 8 * num_blocks : self._bodies].cast("q")
        self._body_bytes = HASH_BYTES + 4 * block_size
        self.tokens = view.cast("i")  # indexed by `token_place`

    @classmethod
    def open(cls, name: str, num_blocks: int, block_size: int, memory_id: int) -> Self | None:
        """Return the records of the last scheduler, or empty records.

        Return None where memory can't be persistent. memory_id: as in `begin`.
        """
        client = MemoryClient.from_environment()
        if client is None:
            return None
        size = num_blocks, block_size
        layout = repr((*size, hash_block(hash_root(""), b"")))  # a new hash: other records
        try:
            memory = client.open(name, cls.size_of(*size), layout.encode())
        except OSError as error:
            log.warning("%s: records end with the scheduler: %s", name, error)
            return None
        records = cls(memory, *size)
        records.begin(memory_id)
        return records

    @staticmethod
    def size_of(num_blocks: int, block_size: int) -> int:
        """Return the size of the memory in bytes."""
        return 8 + num_blocks * (16 + HASH_BYTES + 4 * block_size)

    def begin(self, memory_id: int) -> None:
        """Clear the records unless they describe this KV memory (`WorkerGroup.memory_id`)."""
        if memory_id == 0 or memory_id != self._memory_id[0]:
            self._memory_id[0] = 0
            self._bytes[8 : 8 + self._numbers.nbytes] = bytes(self._numbers.nbytes)
            self._memory_id[0] = memory_id

    def read(self) -> Iterator[tuple[int, Content | Tail]]:
        """Yield recorded blocks with their content."""
        for block, number in enumerate(self._numbers):
            if number:
                begin = self._bodies + block * self._body_bytes
                body = bytes(self._bytes[begin : begin + self._body_bytes])
                parent = self._parents[block]
                hash_, token_ids = body[:HASH_BYTES], body[HASH_BYTES:]
                if number > 0:
                    yield block, Content(number, parent, hash_, token_ids)
                else:
                    known = takewhile(bool, unpack(token_ids))
                    yield block, Tail(-1 - number, hash_, pack(token_id - 1 for token_id in known))

    def write(self, block: int, content: Content) -> None:
        """Record the confirmed content of a full block, unless it is already recorded."""
        if self._numbers[block] == content.number:
            return
        self._write(block, content.number, content.hash + content.token_ids, content.parent)

    def write_tail(self, block: int, parent: int, before: bytes, token_ids: list[int]) -> None:
        """Record the confirmed content of a partly filled block; `before` is `Tail.hash`."""
        body = before + pack([token_id + 1 for token_id in token_ids])
        self._write(block, -1 - parent, body.ljust(self._body_bytes, b"\0"), parent)

    def token_place(self, block: int, index: int) -> int:
        """Return the index in `tokens` of a token id (stored plus 1) of a tail."""
        return (self._bodies + block * self._body_bytes + HASH_BYTES) // 4 + index

    def _write(self, block: int, number: int, body: bytes, parent: int) -> None:
        self.clear(block)
        begin = self._bodies + block * self._body_bytes
        self._bytes[begin : begin + self._body_bytes] = body
        self._parents[block] = parent
        self._numbers[block] = number

    def clear(self, block: int) -> None:
        self._numbers[block] = 0


def recover(records: BlockRecords) -> Recorded:
    """Return recorded blocks whose parents are recorded, least recently used first. Clear others.

    The last use of a content is estimated as the time when its last descendant was published. The
    last blocks of a sequence come before its first blocks.
    """
    last_uses = {ROOT: 0}
    found: Recorded = []
    contents: list[Content] = []
    hashes: set[bytes] = set()
    for block, record in sorted(records.read(), key=lambda read: _order(read[1])):
        is_double = isinstance(record, Content) and record.hash in hashes
        if record.parent not in last_uses or is_double:
            records.clear(block)
            continue
        found.append((block, record))
        if isinstance(record, Content):
            last_uses[record.number] = record.number
            hashes.add(record.hash)
            contents.append(record)
    for content in reversed(contents):
        last_use = max(last_uses[content.parent], last_uses[content.number])
        last_uses[content.parent] = last_use
    found.reverse()
    return sorted(found, key=lambda read: last_uses[_last_full(read[1])])


def _order(record: Content | Tail) -> tuple[bool, int]:
    """Return a sort key that puts every content after its parent."""
    return (False, record.number) if isinstance(record, Content) else (True, record.parent)


def _last_full(record: Content | Tail) -> int:
    return record.number if isinstance(record, Content) else record.parent


class RecoveredBlocks:
    """Recorded blocks that no full block follows, by the hash before them and by their tokens.

    Blocks with the longest common prefix are neighbours in the sorted list of token ids. So a
    search takes O(log n) for n blocks after the same content.
    """

    def __init__(self, found: Recorded, free: Collection[int]) -> None:
        """Index the found blocks. The pool keeps `free`, its free blocks, up to date."""
        self._free = free
        hashes = {record.number: record.hash for _, record in found if isinstance(record, Content)}
        parents = {record.parent for _, record in found if isinstance(record, Content)}
        # block → key in `_by_key` (the hash before the content, or the hash of a `Tail`), content
        self.blocks: dict[int, tuple[bytes, Content | Tail]] = {}
        # key → sorted (token ids, block)
        self._by_key: dict[bytes, list[tuple[array[int], int]]] = {}
        for block, record in found:
            if isinstance(record, Tail) or record.number not in parents:
                key = record.hash if isinstance(record, Tail) else hashes.get(record.parent, b"")
                self.blocks[block] = key, record
                self._by_key.setdefault(key, []).append((unpack(record.token_ids), block))
        for entries in self._by_key.values():
            entries.sort()

    def find(self, parent: int, keys: Iterable[bytes], token_ids: list[int]) -> tuple[int, int]:
        """Return the free block with the most first tokens of `token_ids`, and their number.

        The number is 0 if no block has any. parent: the number of the content before the block.
        keys: possible keys in `_by_key`.
        """
        wanted = array("i", token_ids)
        return max((self._find(parent, key, wanted) for key in keys), key=itemgetter(1))

    def _find(self, parent: int, key: bytes, token_ids: "array[int]") -> tuple[int, int]:
        entries = self._by_key.get(key, [])
        place = bisect_left(entries, (token_ids, -1))
        number, block = 0, -1
        for indices in (range(place, len(entries)), range(place - 1, -1, -1)):
            same = (entries[i] for i in indices if self.blocks[entries[i][1]][1].parent == parent)
            nearest = next((entry for entry in same if entry[1] in self._free), None)
            if nearest and (num_same := num_equal(nearest[0], token_ids)) > number:
                number, block = num_same, nearest[1]
        return block, number

    def remove(self, block: int) -> None:
        """Remove a block if it is in the index."""
        if block in self.blocks:
            key, record = self.blocks.pop(block)
            entries = self._by_key[key]
            del entries[bisect_left(entries, (unpack(record.token_ids), block))]


def num_equal(first: "array[int]", second: "array[int]") -> int:
    """Return the length of the common prefix."""
    number = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        number += 1
    return number
