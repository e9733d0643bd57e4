"""The blocks that an earlier scheduler has recorded, for its successor."""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable
from operator import itemgetter

from penstock.protocol.messages.packed import unpack
from penstock.services.scheduler.blocks.block_records import ROOT, BlockRecords, Content, Tail

Recorded = list[tuple[int, Content | Tail]]  # blocks, and what they hold


def recover(records: BlockRecords) -> Recorded:
    """Return blocks and content that can be found, in the order of last use; clear others.

    The last use of a content is taken to be the time when the last one after it was published.
    Of one sequence, the last blocks come first.
    """
    last_uses = {ROOT: 0}
    found: Recorded = []
    contents: list[Content] = []
    hashes: set[bytes] = set()
    for block, one in sorted(records.read(), key=lambda read: _order(read[1])):
        is_double = isinstance(one, Content) and one.hash in hashes
        if one.parent not in last_uses or is_double:
            records.clear(block)
            continue
        found.append((block, one))
        if isinstance(one, Content):
            last_uses[one.number] = one.number
            hashes.add(one.hash)
            contents.append(one)
    for content in reversed(contents):
        last_use = max(last_uses[content.parent], last_uses[content.number])
        last_uses[content.parent] = last_use
    found.reverse()
    return sorted(found, key=lambda read: last_uses[_last_full(read[1])])


def _order(one: Content | Tail) -> tuple[bool, int]:
    """Return the key of an order in which every content comes after its parent."""
    return (False, one.number) if isinstance(one, Content) else (True, one.parent)


def _last_full(one: Content | Tail) -> int:
    return one.number if isinstance(one, Content) else one.parent


class RecoveredBlocks:
    """Recorded blocks that no full block follows, by the hash before them and by their tokens.

    Neighbours in the order of tokens have the longest prefix in common, so a search takes
    O(log n), however many blocks follow the same content.
    """

    def __init__(self, found: Recorded, free: Collection[int]) -> None:
        """free: the free blocks of the pool, now and later."""
        self._free = free
        hashes = {one.number: one.hash for _, one in found if isinstance(one, Content)}
        parents = {one.parent for _, one in found if isinstance(one, Content)}
        # content with its key in `_by_key`: the hash before it; of a `Tail` its own one
        self.blocks: dict[int, tuple[bytes, Content | Tail]] = {}
        # token ids, and the block that holds them
        self._by_key: dict[bytes, list[tuple[array[int], int]]] = {}
        for block, one in found:
            if isinstance(one, Tail) or one.number not in parents:
                key = one.hash if isinstance(one, Tail) else hashes.get(one.parent, b"")
                self.blocks[block] = key, one
                self._by_key.setdefault(key, []).append((unpack(one.token_ids), block))
        for entries in self._by_key.values():
            entries.sort()

    def find(self, parent: int, keys: Iterable[bytes], token_ids: list[int]) -> tuple[int, int]:
        """Return the free block that begins with most of `token_ids`, and how many; 0 if none does.

        parent: the number of the content before. keys: of this content, as in `blocks`.
        """
        wanted = array("i", token_ids)
        return max((self._find(parent, key, wanted) for key in keys), key=itemgetter(1))

    def _find(self, parent: int, key: bytes, token_ids: "array[int]") -> tuple[int, int]:
        entries = self._by_key.get(key, [])
        place = bisect_left(entries, (token_ids, -1))
        number, block = 0, -1
        for indices in (range(place, len(entries)), range(place - 1, -1, -1)):
            same = (entries[i] for i in indices if self.blocks[entries[i][1]][1].parent == parent)
            nearest = next((one for one in same if one[1] in self._free), None)
            if nearest and (num_same := num_equal(nearest[0], token_ids)) > number:
                number, block = num_same, nearest[1]
        return block, number

    def remove(self, block: int) -> None:
        """Remove a block; nothing happens if it is not there."""
        if block in self.blocks:
            key, one = self.blocks.pop(block)
            entries = self._by_key[key]
            del entries[bisect_left(entries, (unpack(one.token_ids), block))]


def num_equal(one: "array[int]", other: "array[int]") -> int:
    """Return the number of equal integers with which both begin."""
    number = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        number += 1
    return number
