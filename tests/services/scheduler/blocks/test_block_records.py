"""Records of blocks, and the search among the blocks that an earlier scheduler recorded."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.packed import pack
from penstock.services.scheduler.blocks.block_records import (
    HASH_BYTES,
    BlockRecords,
    Content,
    RecoveredBlocks,
    Tail,
    num_equal,
)
from tests.services.scheduler.mortal_records import Life, MortalRecords, SchedulerDiedError

# ---- Records of blocks -----------------------------------------------------------------------


def test_content_is_recorded_once() -> None:
    life, memory = Life(), bytearray(BlockRecords.size_of(2, 1))
    records = MortalRecords(memory, 2, 1, life=life)
    content = Content(1, 0, bytes(HASH_BYTES), bytes(4))
    records.write(1, content)
    life.num_stores = 0
    records.write(1, content)
    with pytest.raises(SchedulerDiedError):
        records.write(0, content)


# ---- The search for the block that begins with most of some tokens ---------------------------


parents, keys = st.integers(0, 1), st.sampled_from([b"a", b"b"])
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(
    blocks=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([b"a", b"b"]), tokens), max_size=12
    ),
    removed=st.sets(st.integers(0, 11)),
    in_use=st.sets(st.integers(0, 11)),
    wanted=tokens,
)
def test_the_longest_prefix_is_found(
    blocks: list[tuple[int, bytes, list[int]]],
    removed: set[int],
    in_use: set[int],
    wanted: list[int],
) -> None:
    tails = [Tail(parent, key, pack(ids)) for parent, key, ids in blocks]
    recovered = RecoveredBlocks(list(enumerate(tails)), set(range(12)) - in_use)
    for block in removed:
        recovered.remove(block)
        recovered.remove(block)
    expected = {
        block: num_equal(array("i", ids), array("i", wanted))
        for block, (parent, key, ids) in enumerate(blocks)
        if (parent, key) == (1, b"a") and block not in removed | in_use
    }
    block, number = recovered.find(1, [b"a"], wanted)
    assert number == max(expected.values(), default=0)
    assert expected.get(block, 0) == number
