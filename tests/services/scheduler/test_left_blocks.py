"""The search for the block that begins with most of some tokens."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.packed import pack
from penstock.services.scheduler.left_blocks import LeftBlocks, num_equal

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(
    blocks=st.lists(st.tuples(st.sampled_from([b"a", b"b"]), tokens), max_size=12),
    removed=st.sets(st.integers(0, 11)),
    in_use=st.sets(st.integers(0, 11)),
    wanted=tokens,
)
def test_the_longest_prefix_is_found(
    blocks: list[tuple[bytes, list[int]]],
    removed: set[int],
    in_use: set[int],
    wanted: list[int],
) -> None:
    left = LeftBlocks((key, pack(ids), block) for block, (key, ids) in enumerate(blocks))
    for block in removed & set(range(len(blocks))):
        key, ids = blocks[block]
        left.remove(key, pack(ids), block)
        left.remove(key, pack(ids), block)
    expected = {
        block: num_equal(array("i", ids), array("i", wanted))
        for block, (key, ids) in enumerate(blocks)
        if key == b"a" and block not in removed | in_use
    }
    block, number = left.find(b"a", array("i", wanted), lambda block: block not in in_use)
    assert number == max(expected.values(), default=0)
    assert expected.get(block, 0) == number
