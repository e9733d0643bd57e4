"""Packed parts of plans as lists."""

from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import BLOCK_BITS, MAX_BLOCKS


def blocks(data: bytes) -> list[tuple[int, int]]:
    """Return appended blocks as (slot, block id)."""
    return [(number >> BLOCK_BITS, number & (MAX_BLOCKS - 1)) for number in unpack(data)]


def split(drafts: bytes) -> list[tuple[int, tuple[int, list[int]]]]:
    """(slot, (position, token ids)) of each."""
    numbers, found = list(unpack(drafts)), []
    while numbers:
        slot, position, count = numbers[:3]
        assert count > 0
        assert slot not in dict(found), "two drafts for a row"
        found.append((slot, (position, numbers[3 : 3 + count])))
        del numbers[: 3 + count]
    return found


def pairs(data: bytes) -> list[tuple[int, int]]:
    """int32 [n, 2] as pairs."""
    numbers = unpack(data)
    return list(zip(numbers[::2], numbers[1::2], strict=True))
