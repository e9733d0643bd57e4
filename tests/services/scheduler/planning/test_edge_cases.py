"""The cases where schedulers go wrong, each by its name. A block has 4 tokens, the context 32."""

from collections.abc import Callable

import pytest

from penstock.protocol.messages.packed import unpack
from penstock.services.scheduler.sequence import CannotFitError, Sequence, Status
from tests.services.scheduler.builders import long_prompt, seed_for_eos_after
from tests.services.scheduler.packed_plans import blocks, pairs
from tests.services.scheduler.simulation import Simulation

BLOCK = 4
LIMIT = 32


def num_cached_blocks(sim: Simulation) -> int:
    return len(sim.pool._cached)


# ---- lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, LIMIT - 1])
def test_prompt_length(length: int) -> None:
    sim = Simulation()
    sequence = sim.add(long_prompt(length), max_tokens=6, ignore_eos=True)
    sim.run()
    [row] = sim.plans[0].added
    assert len(unpack(row.block_ids)) == -(-length // BLOCK)
    assert pairs(sim.plans[0].chunks) == [(0, length)]
    assert len(sequence.output_token_ids) == min(6, LIMIT - length)


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
def test_prompt_of_the_context_limit_is_refused(length: int) -> None:
    with pytest.raises(CannotFitError, match=f"{length} tokens, expected up to {LIMIT - 1},"):
        Simulation().add(long_prompt(length))


def test_prompt_of_the_whole_pool_is_refused() -> None:
    sim = Simulation(num_blocks=2)
    with pytest.raises(CannotFitError, match="expected up to 7, which fit"):
        sim.add(long_prompt(8))
    sim.add(long_prompt(7))
    sim.run()


def test_output_ends_at_the_context_limit_without_a_wasted_row() -> None:
    sim = Simulation(num_plans_in_flight=3)
    sequence = sim.add(long_prompt(5), ignore_eos=True)
    sim.run()
    assert len(sequence.token_ids) == LIMIT
    assert sequence.finish_reason == "length"
    assert not sim.num_wasted


# ---- chunks ----------------------------------------------------------------------------------


def chunks_of(sim: Simulation) -> list[int]:
    """Tokens prefilled by each plan so far, with one sequence."""
    return [num_tokens for plan in sim.plans for _, num_tokens in pairs(plan.chunks)]


def test_chunk_border_is_no_block_border() -> None:
    sim = Simulation(max_num_batched_tokens=5, num_plans_in_flight=3)
    sim.add(long_prompt(13), max_tokens=1)
    assert [(sim.send(), num_cached_blocks(sim))[1] for _ in range(3)] == [1, 2, 3]
    assert chunks_of(sim.run()) == [5, 5, 3]


def test_last_chunk_of_one_token() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sequence = sim.add(long_prompt(9), max_tokens=2, ignore_eos=True)
    assert chunks_of(sim.run()) == [4, 4, 1]
    assert len(sequence.output_token_ids) == 2


# ---- the prefix cache ------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "num_cached"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_full_prompt_cache_hit_computes_at_least_one_token(length: int, num_cached: int) -> None:
    sim = Simulation()
    sim.add(long_prompt(length), max_tokens=1)
    sim.run()
    again = sim.add(long_prompt(length), max_tokens=1)
    sim.run()
    assert again.num_cached_tokens == num_cached
    assert chunks_of(sim) == [length, length - num_cached]


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    """The rows after the first read in the very step that writes."""
    sim = Simulation(computes_once=True)
    for seed in range(4):
        sim.add(long_prompt(9), max_tokens=3, seed=seed)
    plan = sim.send()
    assert plan and [row.num_computed_tokens for row in plan.added] == [0, 8, 8, 8]
    assert [num_tokens for _, num_tokens in pairs(plan.chunks)] == [9, 1, 1, 1]
    assert [s.num_cached_tokens for s in sim.sequences] == [0, 8, 8, 8]
    sim.run()


def test_equal_prompts_longer_than_a_step_are_computed_once() -> None:
    """The others come when the first is through, for it has had the whole budget until then."""
    sim = Simulation(max_num_batched_tokens=6, num_plans_in_flight=4, computes_once=True)
    first, *others = [sim.add(long_prompt(14), max_tokens=1, seed=seed) for seed in range(3)]
    assert [pairs(plan.chunks) for plan in (sim.send(), sim.send(), sim.send()) if plan] == [
        [(0, 6)],
        [(0, 6)],
        [(0, 2), (1, 2), (2, 2)],
    ]
    assert [s.num_cached_tokens for s in others] == [12, 12]
    assert set(first.block_table) & set(others[0].block_table)
    sim.run()


def test_a_prefix_outlives_the_row_that_computes_it() -> None:
    """The request was aborted with its first chunk in flight, which will have run by then."""
    sim = Simulation(max_num_batched_tokens=6, computes_once=True)
    first = in_prefill(sim)
    sim.finish(first, "abort")
    second = sim.add(long_prompt(9), max_tokens=1)
    sim.send()
    assert second.num_cached_tokens == 4
    sim.run()


def test_blocks_of_generated_tokens_are_shared_when_the_tokens_are_known() -> None:
    sim = Simulation(num_plans_in_flight=4)
    first = sim.add(long_prompt(6), max_tokens=5, ignore_eos=True)
    for _ in range(4):
        sim.send()
    assert num_cached_blocks(sim) == 1
    for _ in range(3):
        sim.receive()
    assert num_cached_blocks(sim) == 2
    sim.finish(first, "stop")
    turn = sim.add([*first.token_ids, 1], max_tokens=1)
    sim.run()
    assert turn.num_cached_tokens == 8


def two_free_prefixes(num_blocks: int) -> tuple[Simulation, list[int], int]:
    """Two blocks of `long_prompt` are the next to be evicted; one of another prompt follows."""
    sim = Simulation(num_blocks=num_blocks)
    first = sim.add(long_prompt(9), max_tokens=1)
    sim.send()
    prefix = first.block_table[:2]
    sim.run()
    other = sim.add(long_prompt(5, first=50), max_tokens=1)
    sim.send()
    block = other.block_table[0]
    sim.run()
    return sim, prefix, block


def test_no_eviction_between_match_and_allocate() -> None:
    sim, prefix, other = two_free_prefixes(num_blocks=4)
    sequence = sim.add(long_prompt(13), max_tokens=1)
    sim.send()
    assert sequence.block_table[:2] == prefix
    assert sequence.block_table[3] == other
    sim.run()


def test_matched_blocks_are_no_room_for_others() -> None:
    sim, _, _ = two_free_prefixes(num_blocks=4)
    running = sim.add(long_prompt(2, first=70), max_tokens=2, ignore_eos=True)
    sim.send()
    waiting = sim.add(long_prompt(13), max_tokens=1)
    sim.send()
    assert (running.status, waiting.status) == (Status.DRAINING, Status.WAITING)
    assert sim.pool.num_free_blocks == 3
    sim.run()


# ---- ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_plans", [1, 2, 3])
@pytest.mark.parametrize("num_output_tokens", [2, 3, 4, 5])
def test_eos_around_a_block_border(num_output_tokens: int, num_plans: int) -> None:
    """After the fourth, the wasted rows have a block of their own."""
    sim = Simulation(num_plans_in_flight=num_plans)
    prompt = long_prompt(5)
    sequence = sim.add(prompt, seed=seed_for_eos_after(prompt, num_output_tokens))
    sim.run()
    assert len(sequence.output_token_ids) == num_output_tokens
    assert sim.num_wasted[sequence] == num_plans - 1
    assert num_cached_blocks(sim) == (5 + num_output_tokens - 1) // BLOCK
    last_position = 5 + num_output_tokens - 2 + num_plans - 1
    num_appended = sum(len(blocks(plan.appended)) for plan in sim.plans)
    assert num_appended == last_position // BLOCK - 1


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_all_rows_end_at_once(reason: str) -> None:
    """An empty plan after the last one removes the rows, and brings the last tokens."""
    sim = Simulation(num_ahead=1)
    seed = seed_for_eos_after(long_prompt(5), 3)
    for _ in range(4):
        sim.add(long_prompt(5), seed=seed, max_tokens=2 if reason == "length" else None)
    sim.run()
    assert sorted(unpack(sim.plans[-1].removed)) == [0, 1, 2, 3]
    assert not sim.worker.rows
    assert sim.send() is None
    again = sim.add(long_prompt(5), max_tokens=1)
    sim.send()
    assert (again.status, len(sim.worker.rows)) == (Status.DRAINING, 1)
    sim.run()


def test_slot_is_reused_in_the_next_plan() -> None:
    sim = Simulation(max_num_seqs=1)
    sim.add(long_prompt(5), max_tokens=1)
    sim.add(long_prompt(6), max_tokens=1)
    sim.send()
    plan = sim.send()
    assert plan and list(unpack(plan.removed)) == [row.slot for row in plan.added] == [0]
    sim.run()


# ---- aborts ----------------------------------------------------------------------------------


def waiting(sim: Simulation) -> Sequence:
    return sim.add(max_tokens=2, ignore_eos=True)


def in_prefill(sim: Simulation) -> Sequence:
    sequence = sim.add(long_prompt(9), max_tokens=2, ignore_eos=True)
    sim.send()
    return sequence


def in_flight_twice(sim: Simulation) -> Sequence:
    sequence = sim.add(max_tokens=3, ignore_eos=True)
    sim.send()
    sim.send()
    return sequence


def draining(sim: Simulation) -> Sequence:
    sequence = waiting(sim)
    sim.send()
    sim.send()
    return sequence


def preempted_in_flight(sim: Simulation) -> Sequence:
    sequence = in_flight_twice(sim)
    sim.preempt(sequence)
    return sequence


def finished(sim: Simulation) -> Sequence:
    sequence = waiting(sim)
    sim.run()
    return sequence


State = Callable[[Simulation], Sequence]
STATES: dict[State, Status] = {
    waiting: Status.WAITING,
    in_prefill: Status.RUNNING,
    in_flight_twice: Status.RUNNING,
    draining: Status.DRAINING,
    preempted_in_flight: Status.WAITING,
    finished: Status.FINISHED,
}


@pytest.mark.parametrize("state", STATES)
def test_abort_twice(state: State) -> None:
    """In any state, the first end counts, and what is in flight brings no token."""
    sim = Simulation(max_num_batched_tokens=8)
    sequence = state(sim)
    assert sequence.status is STATES[state]
    num_tokens = len(sequence.token_ids)
    sim.finish(sequence, "abort")
    sim.finish(sequence, "stop")
    assert sequence.finish_reason == ("length" if state is finished else "abort")
    assert sim.pool.num_free_blocks == sim.num_blocks
    sim.run()
    assert len(sequence.token_ids) == num_tokens


def test_blocks_of_an_abort_in_flight_go_to_the_next_plan() -> None:
    sim = Simulation(num_blocks=3)
    aborted = in_prefill(sim)
    heir = sim.add(long_prompt(9, first=40), max_tokens=2)
    blocks = set(aborted.block_table)
    sim.finish(aborted, "abort")
    plan = sim.send()
    assert plan and {*unpack(plan.added[0].block_ids)} == blocks == {*heir.block_table}
    sim.run()
