"""Records of the blocks that the prefix cache holds, in memory that outlives the scheduler.

Only content that a result has confirmed is recorded, and a record is cleared before its block may
be written to. So whatever a killed scheduler leaves is right, as long as the workers have the same
KV memory. A record counts if its number is not 0; the number is written last, by one store.
"""

from collections.abc import Iterator
from mmap import mmap
from typing import NamedTuple

import xxhash

HASH_BYTES = 16
ROOT = 0
"""the parent of the first block of every sequence"""


class Content(NamedTuple):
    """The content of a published block.

    `number` is unique; `parent` is the number of the preceding content. So equal numbers mean equal
    prefixes, whatever the hashes.
    """

    number: int
    parent: int
    hash: bytes
    token_ids: bytes


def hash_block(parent: bytes, token_ids: bytes) -> bytes:
    """Return 128 bits, chained: equal only for equal prefixes (xxh3, xxhash.com)."""
    return xxhash.xxh3_128_digest(parent + token_ids)


class BlockRecords:
    """One record per block: int64 numbers and parents, hashes, and int32 token ids."""

    def __init__(self, memory: mmap | bytearray, num_blocks: int, block_size: int) -> None:
        """memory: of `size_of` bytes, zeros or those of an earlier scheduler."""
        self._bytes = view = memoryview(memory)
        self._bodies = 8 + 16 * num_blocks
        self._memory = view[:8].cast("q")
        self._numbers = view[8 : 8 + 8 * num_blocks].cast("q")
        self._parents = view[8 + 8 * num_blocks : self._bodies].cast("q")
        self._body_bytes = HASH_BYTES + 4 * block_size

    @staticmethod
    def size_of(num_blocks: int, block_size: int) -> int:
        """Return the number of bytes of the memory."""
        return 8 + num_blocks * (16 + HASH_BYTES + 4 * block_size)

    def begin(self, memory: int) -> None:
        """Keep the records if they are of this KV memory, `WorkerGroup.memory`, or clear them."""
        if memory == 0 or memory != self._memory[0]:
            self._memory[0] = 0
            self._bytes[8 : 8 + self._numbers.nbytes] = bytes(self._numbers.nbytes)
            self._memory[0] = memory

    def read(self) -> Iterator[tuple[int, Content]]:
        """Yield blocks and their content."""
        for block, number in enumerate(self._numbers):
            if number:
                begin = self._bodies + block * self._body_bytes
                body = bytes(self._bytes[begin : begin + self._body_bytes])
                parent, hash_ = self._parents[block], body[:HASH_BYTES]
                yield block, Content(number, parent, hash_, body[HASH_BYTES:])

    def recover(self) -> list[tuple[int, Content]]:
        """Return blocks and content that can be found, in the order of last use; clear others.

        The last use of a content is taken to be the time when the last one after it was published.
        Of one sequence, the last blocks come first.
        """
        last_uses = {ROOT: 0}
        found: list[tuple[int, Content]] = []
        hashes: set[bytes] = set()
        for block, content in sorted(self.read(), key=lambda one: one[1].number):
            if content.parent in last_uses and content.hash not in hashes:
                found.append((block, content))
                last_uses[content.number] = content.number
                hashes.add(content.hash)
            else:
                self.clear(block)
        for _, content in reversed(found):
            last_use = max(last_uses[content.parent], last_uses[content.number])
            last_uses[content.parent] = last_use
        return sorted(found, key=lambda one: (last_uses[one[1].number], -one[1].number))

    def write(self, block: int, content: Content) -> None:
        """Record confirmed content of a block without a record."""
        begin = self._bodies + block * self._body_bytes
        self._bytes[begin : begin + self._body_bytes] = content.hash + content.token_ids
        self._parents[block] = content.parent
        self._numbers[block] = content.number

    def clear(self, block: int) -> None:
        self._numbers[block] = 0
