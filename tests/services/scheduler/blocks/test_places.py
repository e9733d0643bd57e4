"""KV blocks and state blocks in one memory: which place has what."""

from itertools import pairwise

import pytest

from penstock.services.scheduler.blocks import state_blocks
from penstock.services.scheduler.blocks.block_pool import BlockPool
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.simulation import Simulation

SIZE = 3  # KV blocks of 4 tokens in a place
UNIT = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", UNIT)


def shared(num_places: int, **options: object) -> Simulation:
    sizes = {"num_state_blocks": num_places, "blocks_per_state": SIZE, "max_model_len": 1000}
    return Simulation(**sizes, **options)  # type: ignore[arg-type]


def states_of(sim: Simulation) -> BlockPool:
    states = sim.scheduler.block_manager.states
    assert states
    return states.pool


def ask(sim: Simulation, length: int, first: int, max_tokens: int = 1) -> int:
    """Return the cached tokens of a prompt, which runs alone."""
    sequence = sim.add(long_prompt(length, first), max_tokens=max_tokens, ignore_eos=True)
    sim.run()
    return sequence.num_cached_tokens


def test_a_sequence_alone_has_all_places_but_two() -> None:
    sim = shared(6)
    assert sim.limit == 4 * SIZE * 4
    for first in range(10, 14):  # leave KV and checkpoints
        ask(sim, 9, first)
    assert states_of(sim).num_blocks > 2
    ask(sim, sim.limit - 1, 100)
    assert states_of(sim).num_blocks == 2
    assert ask(sim, sim.limit - 1, 100) > 0


def test_the_least_recently_used_of_both_kinds_is_evicted() -> None:
    sim = shared(11)
    for first in range(10, 20):
        ask(sim, 9, first)
    assert [ask(sim, 9, first) for first in range(19, 9, -1)] == [8] * 5 + [0] * 5


def test_a_place_with_nothing_to_lose_goes_first() -> None:
    """Sampled tokens, and states that are no checkpoints, are of use to nobody."""
    sim, prompts = shared(24, max_num_seqs=6), (100, 200, 300, 400)
    for first in prompts:
        ask(sim, 21, first)
    ask(sim, 5, 500, max_tokens=50)
    for first in range(600, 900, 50):
        ask(sim, 5, first)
    assert [ask(sim, 21, first) for first in prompts] == [20] * 4
    many = [sim.add(long_prompt(3, first), max_tokens=9) for first in range(10, 70, 10)]
    sim.run()
    assert all(sequence.finish_reason for sequence in many)
    assert len(states_of(sim)._empty) > 8
    ask(sim, 12 * SIZE * UNIT, 1000)
    assert len(states_of(sim)._empty) < 4
    assert ask(sim, 21, prompts[-1]) == 20


@pytest.mark.parametrize("num_host_slots", [0, 300])
def test_a_plan_moves_one_place_while_the_host_copies_it_and_others_run(
    num_host_slots: int,
) -> None:
    sim = shared(24, max_num_seqs=4, num_host_slots=num_host_slots, num_plans_in_flight=1)
    ask(sim, sim.limit - 1, 100)
    running = sim.add(long_prompt(5, 10), max_tokens=30, ignore_eos=True)
    sim.step()
    waiting = [
        sim.add(long_prompt(5, first), max_tokens=30, ignore_eos=True) for first in (20, 30, 40)
    ]
    numbers = [states_of(sim).num_blocks]
    while not all(sequence.block_table for sequence in waiting):
        sim.step()
        numbers.append(states_of(sim).num_blocks)
        assert running.block_table
    most = max(after - before for before, after in pairwise(numbers))
    assert most == 1 if num_host_slots else most > 4
    sim.run()


def test_old_kv_goes_before_newer_checkpoints() -> None:
    sim, prompts = shared(20), range(200, 700, 100)
    ask(sim, 8 * SIZE * UNIT, 1000)
    for first in prompts:
        ask(sim, 9, first)
    ask(sim, 4 * SIZE * UNIT, 2000)
    assert [ask(sim, 9, first) for first in prompts] == [8] * 5


def test_a_place_was_used_when_any_of_its_blocks_was() -> None:
    sim = shared(9)
    ask(sim, 5, 10)  # so that the next prompt begins in the middle of a place
    for first in range(100, 1500, 100):
        ask(sim, 9, 50)
        ask(sim, 5, first)
    assert ask(sim, 9, 50) == 8


def cached_after(restarts: bool) -> list[int]:
    """Return the cached tokens of prompts, the first one first, after others have come."""
    sim = shared(24)
    for first in range(100, 900, 100):
        ask(sim, 13, first)
    if restarts:
        sim.restart_scheduler()
    for first in range(1000, 1400, 100):
        ask(sim, 13, first)
    return [ask(sim, 13, first) for first in range(800, 0, -100)]


def test_content_keeps_its_order_when_the_scheduler_dies() -> None:
    found = cached_after(restarts=False)
    assert found[0]
    assert not found[-1]
    assert cached_after(restarts=True) == found


def test_a_sequence_waits_for_two_places_without_kv_in_use() -> None:
    sim = shared(4, max_num_seqs=3)
    first = sim.add(long_prompt(5, 10), max_tokens=15, ignore_eos=True)
    sim.step()
    assert states_of(sim).num_blocks == 2
    second = sim.add(long_prompt(5, 20), max_tokens=2, ignore_eos=True)
    sim.step()
    assert not second.block_table, "three of four places are in use"
    assert first.block_table
    sim.run()
    assert (len(first.output_token_ids), len(second.output_token_ids)) == (15, 2)


def test_sequences_that_run_side_by_side_fill_places_of_their_own() -> None:
    sim = shared(14, max_num_seqs=2)
    running = [sim.add(long_prompt(5, first), max_tokens=30, ignore_eos=True) for first in (10, 20)]
    while len(running[1].block_table) < 2 * SIZE + 1:
        sim.step()
    places = [{block // SIZE for block in sequence.block_table} for sequence in running]
    assert [len(found) for found in places] == [3, 3]
    assert len(places[0] & places[1]) == 1, "that of the prompts"
    sim.run()


@pytest.mark.parametrize("loses_worker", [False, True])
def test_checkpoints_keep_their_places_when_the_scheduler_dies(loses_worker: bool) -> None:
    sim = shared(12)
    for first in (10, 20, 30):
        ask(sim, 17, first)
    number = len(states_of(sim)._contents)
    assert number > 1
    sim.restart_scheduler(0, loses_worker)
    assert (states_of(sim).num_blocks, len(states_of(sim)._contents)) == (number, number)
    assert [ask(sim, 17, first) for first in (10, 20, 30)] == [16] * 3


def test_all_places_have_kv_after_the_memory_was_lost() -> None:
    sim = shared(12)
    for first in (10, 20, 30):
        ask(sim, 17, first)
    assert states_of(sim).num_blocks
    sim.restart(keeps_memory=False)
    assert not states_of(sim).num_blocks
    assert [ask(sim, 17, first) for first in (10, 10)] == [0, 16]
