"""KV blocks and state blocks in one memory: which place has what."""

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
    assert places[0].isdisjoint(places[1])
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
