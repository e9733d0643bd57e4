"""The order in which blocks are given out again, and what the prefix cache finds."""

from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.block_records import ROOT, hash_block, hash_root
from penstock.services.scheduler.sequence import Sequence
from tests.services.scheduler.builders import make_sequence

X, Y, Z = b"xxxx", b"yyyy", b"zzzz"
"""token ids of full blocks"""


def hashes(*token_ids: bytes) -> list[bytes]:
    """Return the hashes of a chain."""
    return list(accumulate(token_ids, hash_block, initial=hash_root("")))[1:]


def compute(pool: BlockPool, *token_ids: bytes) -> list[int]:
    """Take blocks and publish them as a chain."""
    blocks, content = [], ROOT
    for hash_, tokens in zip(hashes(*token_ids), token_ids, strict=True):
        blocks.append(pool.take())
        content = pool.publish(blocks[-1], content, hash_, tokens)
    return blocks


def find(pool: BlockPool, *token_ids: bytes) -> list[int]:
    """Return the cached blocks of a chain."""
    return pool.match(hashes(*token_ids))


def take_all(pool: BlockPool) -> list[int]:
    """Every free block, in the order in which they are given out."""
    return [pool.take() for _ in range(pool.num_free_blocks)]


def test_last_blocks_of_a_sequence_are_reused_first() -> None:
    pool = BlockPool(3)
    blocks = compute(pool, X, Y, Z)
    pool.release(blocks)
    assert take_all(pool) == blocks[::-1]


def test_least_recently_used_sequence_goes_first() -> None:
    pool = BlockPool(4)
    old, new = compute(pool, X, Y), compute(pool, Z, X)
    pool.release(old)
    pool.release(new)
    pool.share(find(pool, X, Y))
    pool.release(old)
    assert take_all(pool) == [*new[::-1], *old[::-1]]


def test_blocks_without_content_are_reused_first() -> None:
    pool = BlockPool(4)
    cached, empty = compute(pool, X, Y), [pool.take()]
    pool.release(cached)
    pool.release(empty)
    assert [pool.take(), pool.take()] == [*empty, 3]
    assert take_all(pool) == cached[::-1]


def test_shared_block_is_free_when_the_last_holder_releases_it() -> None:
    pool = BlockPool(2)
    blocks = compute(pool, X)
    assert pool.num_free_without(blocks) == 1
    pool.share(find(pool, X))
    pool.release(blocks)
    assert pool.num_free_blocks == 1
    pool.release(blocks)
    assert pool.num_free_blocks == 2
    assert pool.num_free_without(blocks) == 1


def test_evicted_block_is_not_found() -> None:
    pool = BlockPool(2)
    blocks = compute(pool, X, Y)
    pool.release(blocks)
    assert find(pool, X, Y, Z) == blocks
    assert pool.take() == blocks[1]
    assert find(pool, X, Y) == blocks[:1]


def test_no_block_left() -> None:
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(KeyError):
        pool.take()


def test_equal_block_stays_private_and_what_follows_is_found() -> None:
    pool = BlockPool(4)
    first, second = compute(pool, X), compute(pool, X, Y)
    assert find(pool, X, Y) == [first[0], second[1]]


def test_parent_evicted_before_its_child_spoils_the_cache_only_once() -> None:
    """The child of an equal block is published; then its parent is evicted alone."""
    pool = BlockPool(4)
    first, second = compute(pool, X), compute(pool, X, Y)
    pool.release(first)
    taken = [pool.take(), pool.take()]
    assert first[0] in taken
    pool.release(taken)
    pool.release(second)
    pool.release(compute(pool, X, Y))
    assert len(find(pool, X, Y)) == 2


def test_what_follows_a_hidden_block_is_not_found_after_an_equal_block() -> None:
    """Blocks after a hidden block may have been computed from NaN."""
    pool = BlockPool(4)
    compute(pool, X, Y)
    pool.unpublish(hashes(X))
    again = compute(pool, X)
    assert find(pool, X, Y) == again


class PlainCache:
    """The slow reference of `BlockManager`: prefixes by block, and a list in order of last use."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free = list(range(num_blocks))
        self.block_size = block_size
        self.blocks: dict[tuple[int, ...], int] = {}
        """cached prefixes, which end with their block"""

    def allocate(self, prompt: SequenceOf[int]) -> list[int] | None:
        """Return the block table; None if too few are free. Then the whole prompt is computed."""
        size, table = self.block_size, []
        for end in range(size, len(prompt), size):
            if tuple(prompt[:end]) not in self.blocks:
                break
            table.append(self.blocks[tuple(prompt[:end])])
        free = [block for block in self.free if block not in table]
        num_new = -(-len(prompt) // size) - len(table)
        if num_new > len(free):
            return None
        new, self.free = free[:num_new], free[num_new:]
        self.blocks = {p: block for p, block in self.blocks.items() if block not in new}
        table += new
        for end, block in zip(range(size, len(prompt) + 1, size), table, strict=False):
            self.blocks.setdefault(tuple(prompt[:end]), block)
        return table

    def release(self, table: list[int], others: list[list[int]]) -> None:
        """`others` are the tables of those that still run."""
        for block in reversed(table):
            if not any(block in other for other in others):
                cached = block in self.blocks.values()
                self.free.insert(len(self.free) if cached else 0, block)


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=9)


@settings(settings.get_profile("scheduler"))
@given(
    block_size=st.integers(1, 4),
    num_blocks=st.integers(1, 12),
    moves=st.lists(prompts | st.integers(0, 9), max_size=40),
)
def test_block_tables_are_those_of_the_plain_cache(
    block_size: int, num_blocks: int, moves: list[list[int] | int]
) -> None:
    """A list is a prompt that comes, a number one that goes."""
    manager = BlockManager(BlockPool(num_blocks), block_size)
    plain = PlainCache(num_blocks, block_size)
    running: list[Sequence] = []
    for move in moves:
        if isinstance(move, list):
            sequence = make_sequence(move)
            allocated = manager.allocate(sequence, keep_watermark=False)
            assert (sequence.block_table if allocated else None) == plain.allocate(move)
            if allocated:
                manager.publish(sequence, len(move))
                running.append(sequence)
        elif running:
            sequence = running.pop(move % len(running))
            plain.release(sequence.block_table, [other.block_table for other in running])
            manager.free(sequence)
        assert manager.pool.num_free_blocks == len(plain.free)


def test_only_requests_of_one_salt_share_blocks() -> None:
    manager = BlockManager(BlockPool(16), 4)
    cached = {}
    for salt in ("", "mine", "other", "mine", ""):
        sequence = make_sequence(range(9), cache_salt=salt)
        assert manager.allocate(sequence, keep_watermark=False)
        cached.setdefault(salt, []).append(sequence.num_planned_tokens)
        manager.publish(sequence, 9)
        manager.free(sequence)
    assert cached == {"": [0, 8], "mine": [0, 8], "other": [0]}
