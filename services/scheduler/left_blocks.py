"""The blocks that the sequences of an earlier scheduler had begun to fill, for their successors."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable

from penstock.protocol.messages.packed import unpack

Entry = tuple["array[int]", int]
"""token ids, and the block that holds them"""


class LeftBlocks:
    """Blocks by the hash before them and by their tokens.

    Neighbours in the order of tokens have the longest prefix in common, so a search takes
    O(log n), however many blocks follow the same content.
    """

    def __init__(self, blocks: Iterable[tuple[bytes, bytes, int]]) -> None:
        """blocks: (hash before, token ids, block)."""
        self._by_hash: dict[bytes, list[Entry]] = {}
        for before, token_ids, block in blocks:
            self._by_hash.setdefault(before, []).append((unpack(token_ids), block))
        for entries in self._by_hash.values():
            entries.sort()

    def find(
        self, before: bytes, token_ids: "array[int]", is_left: Callable[[int], bool]
    ) -> tuple[int, int]:
        """Return the block that begins with most of `token_ids`, and how many; 0 if none does."""
        entries = self._by_hash.get(before, [])
        place = bisect_left(entries, (token_ids, -1))
        number, block = 0, -1
        for indices in (range(place, len(entries)), range(place - 1, -1, -1)):
            nearest = next((entries[i] for i in indices if is_left(entries[i][1])), None)
            if nearest and (num_same := num_equal(nearest[0], token_ids)) > number:
                number, block = num_same, nearest[1]
        return block, number

    def remove(self, before: bytes, token_ids: bytes, block: int) -> None:
        """Remove a block; nothing happens if it is not there."""
        entries = self._by_hash.get(before, [])
        entry = unpack(token_ids), block
        place = bisect_left(entries, entry)
        if entries[place : place + 1] == [entry]:
            del entries[place]


def num_equal(one: "array[int]", other: "array[int]") -> int:
    """Return the number of equal integers with which both begin."""
    number = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        number += 1
    return number
