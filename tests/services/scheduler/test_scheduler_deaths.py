"""Deaths of the scheduler: the records of the KV blocks say what the workers' memory holds.

The reference worker asserts that every block it reads holds the KV of exactly that prefix.
"""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.packed import pack, unpack
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.scheduler.blocks.block_records import HASH_BYTES, BlockRecords, Content, Tail
from tests.search import scaled
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.mortal_records import Life, MortalRecords, SchedulerDiedError
from tests.services.scheduler.reference import LOOP
from tests.services.scheduler.simulation import Simulation

BLOCK_SIZE = 4


def test_a_running_sequence_finds_its_blocks() -> None:
    sim = Simulation()
    sequence = sim.add(long_prompt(9), max_tokens=9, ignore_eos=True)
    while len(sequence.token_ids) < 14:
        sim.step()
    table = list(sequence.block_table)
    sim.restart_scheduler()
    plan = sim.send()
    assert plan and (plan.epoch, plan.step) == (2, 0)
    assert list(unpack(plan.added[0].block_ids)) == table
    assert plan.added[0].num_computed_tokens == 13
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == 0


@pytest.mark.parametrize("num_undelivered", [1, 3])
@pytest.mark.parametrize("num_tokens", range(10, 22))
def test_no_token_is_computed_again(num_tokens: int, num_undelivered: int) -> None:
    """Whatever the last block holds, and also if the gateway lacks tokens of a full one."""
    sim = Simulation()
    params = {"max_tokens": 26, "seed": LOOP, "cache_salt": "s"}
    sequences = [sim.add(long_prompt(6, first), **params) for first in (1, 50)]  # type: ignore
    while len(sequences[0].token_ids) < num_tokens:
        sim.step()
    sim.step()
    for _ in range(10):  # deaths in a row
        sim.restart_scheduler(num_undelivered)
        assert sim.send()
        assert sim.scheduler.num_recomputed_tokens == 0
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == 0


def test_a_tail_is_of_one_salt() -> None:
    sim = Simulation()
    sim.add([1, 2, 3], max_tokens=1, cache_salt="a")
    sim.run()
    sim.restart_scheduler()
    for salt, num_cached in (("b", 0), ("", 0), ("a", 2)):
        one = sim.add([1, 2, 3], max_tokens=1, cache_salt=salt)
        sim.run()
        assert one.num_cached_tokens == num_cached


def test_a_full_block_that_another_sequence_has_is_not_taken() -> None:
    """The gateway knows fewer tokens of one of two equal requests."""
    sim = Simulation()
    prompt = long_prompt(6)
    sim.add(prompt, max_tokens=20, seed=LOOP)
    while len(sim.sequences[0].token_ids) < 11:
        sim.step()
    sim.restart_scheduler()
    sim.send()
    sim.add(prompt, [1], max_tokens=20, seed=LOOP)
    sim.run()


def test_blocks_of_a_sequence_that_failed_are_not_found() -> None:
    sim = Simulation()
    sim.add(
        long_prompt(6), max_tokens=20, seed=LOOP, structured_outputs=StructuredOutputs(regex="a")
    )
    while not sim.failed:
        sim.step()
    assert not list(sim.pool.records.read())  # type: ignore[union-attr]


def test_blocks_that_failed_since_are_not_found() -> None:
    sim = Simulation()
    prompt = long_prompt(4)
    sim.add(prompt, max_tokens=1)
    sim.run()
    sim.restart_scheduler()
    one = sim.add([*prompt, 1, 2], seed=LOOP, structured_outputs=StructuredOutputs(regex="a"))
    while not sim.failed:
        sim.step()
    assert one.num_cached_tokens == 4
    other = sim.add(prompt[:3], prompt[3:], max_tokens=2)
    sim.send()
    assert other.num_cached_tokens == 0


def test_a_tail_is_used_once() -> None:
    """Two requests of one prompt each write a last block."""
    sim = Simulation()
    sim.add(long_prompt(6), max_tokens=20, seed=LOOP)
    sim.step()
    sim.restart_scheduler()
    sim.add(long_prompt(6), max_tokens=20, seed=LOOP)
    sim.step()
    tables = [one.block_table for one in sim.sequences]
    assert tables[0][1] != tables[1][1]
    sim.run()


def test_a_block_with_a_tail_is_given_to_others_after_empty_ones() -> None:
    sim = Simulation(num_blocks=4)
    sim.add([1, 2, 3], max_tokens=1)
    sim.run()
    sim.restart_scheduler()
    assert sim.pool.recovered
    [tail] = sim.pool.recovered.blocks
    assert list(sim.pool.free_blocks())[-1] == tail
    sim.add(long_prompt(15, 50), max_tokens=1)
    sim.run()
    assert sim.add([1, 2, 3], max_tokens=1).num_cached_tokens == 0
    sim.run()


def test_the_prefix_cache_outlives_the_scheduler() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1)
    sim.run()
    for _ in range(2):
        sim.restart_scheduler()
        again = sim.add(long_prompt(9), max_tokens=1)
        sim.run()
        assert again.num_cached_tokens == 8


def test_chunks_of_a_prefill_are_found() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add(long_prompt(15), max_tokens=2)
    for _ in range(2):
        sim.send()
        sim.receive()
    sim.send()  # it runs, but nobody knows
    sim.restart_scheduler()
    plan = sim.send()
    assert plan and plan.added[0].num_computed_tokens == 8


def test_records_of_other_memory_are_void() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1)
    sim.run()
    sim.restart(keeps_memory=False)
    sim.restart_scheduler()
    assert not list(sim.pool.records.read())  # type: ignore[union-attr]
    records = BlockRecords(bytearray(BlockRecords.size_of(2, 1)), 2, 1)
    records.begin(7)
    records.write(1, Content(1, 0, bytes(HASH_BYTES), bytes(4)))
    records.begin(7)
    assert list(records.read())
    for other in (8, 0):
        records.begin(other)
        assert not list(records.read())


def test_blocks_are_reused_in_the_same_order() -> None:
    """The least recently published sequence first, and of one sequence the last blocks."""
    sim = Simulation()
    for first in (300, 100, 200):
        sim.add(long_prompt(13, first), max_tokens=1)
        sim.run()
    order = list(sim.pool.free_blocks())
    sim.restart_scheduler()
    full = [block for block in order if block in sim.pool._contents]
    assert len(full) == 9
    assert [block for block in sim.pool.free_blocks() if block in sim.pool._contents] == full
    assert set(sim.pool.free_blocks()) == set(order)


def test_a_record_is_whole_or_none() -> None:
    """Whatever its body held before."""
    old, new = (Content(n, n - 1, bytes([n]) * HASH_BYTES, bytes([n] * 8)) for n in (1, 2))
    found = []
    for num_stores in range(12):
        memory, life = bytearray(BlockRecords.size_of(1, 2)), Life()
        records = MortalRecords(memory, 1, 2, life=life)
        records.write(0, old)
        records.clear(0)
        life.num_stores = num_stores
        with suppress(SchedulerDiedError):
            records.write(0, new)
        found.append(list(records.read()))
    assert [] in found
    assert all(one in ([], [(0, new)]) for one in found)
    assert found[-1]


def test_a_tail_becomes_a_record_or_none() -> None:
    tail = Tail(0, bytes(HASH_BYTES), pack([7]))
    new = Content(2, 1, bytes([2]) * HASH_BYTES, pack([5, 6]))
    found = []
    for num_stores in range(9):
        memory, life = bytearray(BlockRecords.size_of(1, 2)), Life()
        records = MortalRecords(memory, 1, 2, life=life)
        records.write_tail(0, 0, tail.hash, [7])
        life.num_stores = num_stores
        with suppress(SchedulerDiedError):
            records.write(0, new)
        found.append(list(records.read()))
    assert found[0] == [(0, tail)]
    assert all(one in ([(0, tail)], [], [(0, new)]) for one in found)
    assert found[-1] == [(0, new)]


def test_a_block_that_another_sequence_got_meanwhile_is_not_confirmed() -> None:
    sim = Simulation(num_blocks=3, block_size=1)
    sim.add([1], max_tokens=1)
    one = sim.add([2, 3], max_tokens=1)
    sim.send()
    table = set(one.block_table)
    sim.finish(one, "abort")
    other = sim.add([4, 5], max_tokens=1)
    sim.send()
    assert set(other.block_table) == table
    sim.receive()
    sim.restart_scheduler(loses_worker=True)
    sim.run()


FIRST = range(3)
"""tokens with which prompts begin; the others are equal"""
requests = st.tuples(st.sampled_from(FIRST), st.integers(16, 25), st.integers(1, 7))
"""the first token, the prompt's length, and the number of tokens to generate"""
steps = st.integers(1, 12)
deaths = st.tuples(st.integers(0, 5), st.booleans())
moves = st.lists(st.tuples(requests, steps) | steps | deaths, min_size=2, max_size=16)


@pytest.mark.search
@settings(settings.get_profile("scheduler"), max_examples=scaled(150))
@given(
    moves=moves,
    num_stores=st.integers(0, 60),
    num_blocks=st.integers(8, 10) | st.just(60),
    num_plans=st.sampled_from([1, 2, 4]),
    budget=st.integers(2, 12) | st.just(64),
    method=st.sampled_from(["none", "ngram", "mtp"]),
)
def test_only_blocks_that_are_right_are_found(
    moves: list[tuple[tuple[int, int, int], int] | int | tuple[int, bool]],
    num_stores: int,
    num_blocks: int,
    num_plans: int,
    budget: int,
    method: str,
) -> None:
    """The scheduler dies between two steps, or at a store to its records."""
    sim = Simulation(
        num_blocks=num_blocks,
        max_model_len=32,
        num_plans_in_flight=num_plans,
        max_num_batched_tokens=budget,
        speculative_method=method,
    )
    sim.life.num_stores = num_stores
    for move in moves:
        match move:
            case (int() as num_undelivered, bool() as loses_worker):
                sim.restart_scheduler(num_undelivered, loses_worker)
                sim.life.num_stores = num_stores
            case ((first, length, max_tokens), num_steps):
                prompt = [first, *[1, 2, 3] * 8][:length]
                sim.add(prompt, max_tokens=max_tokens, ignore_eos=True)
                for _ in range(num_steps):
                    sim.step()
            case int():
                for _ in range(move):
                    sim.step()
    sim.restart_scheduler()
    for first in FIRST:  # the worker sees whether a block that it finds is right
        sim.add([first, *[1, 2, 3] * 8], max_tokens=1)
    sim.run()
