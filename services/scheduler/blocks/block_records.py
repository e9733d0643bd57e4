"""Records of the blocks that the prefix cache holds, in memory that outlives the scheduler.

Only content that a result has confirmed is recorded, and a record is cleared before its block may
be written to. So whatever a killed scheduler leaves is right, as long as the workers have the same
KV memory. A record counts if its number is not 0; the number is written last, by one store. The
record of a block that is not full yet has a negative number, and grows by one store a token.
"""

from collections.abc import Iterator
from hashlib import sha256
from itertools import takewhile
from mmap import mmap
from typing import NamedTuple

from penstock.protocol.messages.packed import pack, unpack

HASH_BYTES = 32
ROOT = 0  # the parent of the first block of every sequence


class Content(NamedTuple):
    """The content of a published block.

    `number` is unique; `parent` is the number of the preceding content. So equal numbers mean equal
    prefixes, whatever the hashes.
    """

    number: int
    parent: int
    hash: bytes
    token_ids: bytes


class Tail(NamedTuple):
    """The confirmed content of a block that is not full.

    `parent` is the number of the preceding content; `hash` is the chained hash of no tokens.
    """

    parent: int
    hash: bytes
    token_ids: bytes


def hash_root(cache_salt: str) -> bytes:
    """Return the parent of the first block: nobody can choose a salt that gives a block's hash."""
    return sha256(b"salt:" + cache_salt.encode()).digest()


def hash_block(parent: bytes, token_ids: bytes) -> bytes:
    """Return the identity of a prefix, in the pool and in all tiers: 256 bits, chained.

    Equal hashes mean equal salts and tokens, for anybody and any time (SHA-256).
    parent: `hash_root`, or the hash of the block before.
    """
    return sha256(b"block" + parent + token_ids).digest()


class BlockRecords:
    """One record per block: int64 numbers and parents, hashes, and int32 token ids.

    The number of a tail is -1 - `parent`; 1 is added to its token ids, and a 0 ends them.
    """

    def __init__(self, memory: mmap | bytearray, num_blocks: int, block_size: int) -> None:
        """memory: of `size_of` bytes, zeros or those of an earlier scheduler."""
        self._bytes = view = memoryview(memory)
        self._bodies = 8 + 16 * num_blocks
        self._memory_id = view[:8].cast("q")
        self._numbers = view[8 : 8 + 8 * num_blocks].cast("q")
        self._parents = view[8 + 8 * num_blocks : self._bodies].cast("q")
        self._body_bytes = HASH_BYTES + 4 * block_size
        self.tokens = view.cast("i")  # for `token_place`

    @staticmethod
    def size_of(num_blocks: int, block_size: int) -> int:
        """Return the number of bytes of the memory."""
        return 8 + num_blocks * (16 + HASH_BYTES + 4 * block_size)

    def begin(self, memory_id: int) -> None:
        """Keep the records if they are of this KV memory, that of `WorkerGroup`, or clear them."""
        if memory_id == 0 or memory_id != self._memory_id[0]:
            self._memory_id[0] = 0
            self._bytes[8 : 8 + self._numbers.nbytes] = bytes(self._numbers.nbytes)
            self._memory_id[0] = memory_id

    def read(self) -> Iterator[tuple[int, Content | Tail]]:
        """Yield blocks and their content."""
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
                    yield block, Tail(-1 - number, hash_, pack(one - 1 for one in known))

    def write(self, block: int, content: Content) -> None:
        """Record confirmed content of a full block, unless it is recorded already."""
        if self._numbers[block] == content.number:
            return
        self._write(block, content.number, content.hash + content.token_ids, content.parent)

    def write_tail(self, block: int, parent: int, before: bytes, token_ids: list[int]) -> None:
        """Record confirmed content of a block that is not full, as in `Tail`."""
        body = before + pack([one + 1 for one in token_ids])
        self._write(block, -1 - parent, body.ljust(self._body_bytes, b"\0"), parent)

    def token_place(self, block: int, index: int) -> int:
        """Return the place in `tokens` where a token id + 1 of a tail is to be stored."""
        return (self._bodies + block * self._body_bytes + HASH_BYTES) // 4 + index

    def _write(self, block: int, number: int, body: bytes, parent: int) -> None:
        self.clear(block)
        begin = self._bodies + block * self._body_bytes
        self._bytes[begin : begin + self._body_bytes] = body
        self._parents[block] = parent
        self._numbers[block] = number

    def clear(self, block: int) -> None:
        self._numbers[block] = 0
