"""Deaths of workers whose KV memory outlives them: only what was in flight is computed again."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.packed import unpack
from penstock.services.scheduler.sequence import Status
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.simulation import Simulation


def num_in_flight(sim: Simulation) -> int:
    """Return the tokens that plans in flight compute."""
    plans = sim.plans[len(sim.plans) - len(sim.scheduler.in_flight) :]
    chunks = sum(sum(unpack(plan.chunks)[1::2]) for plan in plans)
    in_flight = sim.scheduler.in_flight
    return chunks + sum(
        sequence not in plan.chunks.values() for plan in in_flight for sequence in plan.sampled
    )


def test_a_row_continues_with_its_last_token_and_its_blocks() -> None:
    sim = Simulation(num_blocks=8)
    sequence = sim.add(long_prompt(9), max_tokens=8, ignore_eos=True)
    for _ in range(3):
        sim.step()
    table, known = list(sequence.block_table), len(sequence.token_ids)
    sim.restart(keeps_memory=True)
    assert (sequence.status, sequence.block_table) == (Status.RUNNING, table)
    plan = sim.send()
    assert plan and (plan.epoch, plan.step, plan.removed) == (2, 0, b"")
    [row] = plan.added
    assert list(unpack(row.token_ids)) == sequence.token_ids[known - 1 :]
    assert row.num_skipped == row.num_computed_tokens == known - 1
    assert list(unpack(plan.chunks)) == [row.slot, 1]
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == sim.scheduler.num_preemptions + 1 == 1


def test_the_tokens_of_a_row_are_those_of_its_full_blocks_and_the_rest() -> None:
    sim = Simulation()
    sequence = sim.add(long_prompt(9), max_tokens=8, ignore_eos=True)
    for _ in range(6):
        assert list(unpack(sequence.packed_token_ids())) == sequence.token_ids
        sim.step()
    assert len(sequence.block_hashes) > 2


def test_published_blocks_are_published_again_where_they_are_unknown() -> None:
    sim = Simulation()
    sequence = sim.add(long_prompt(9), max_tokens=8, ignore_eos=True)
    for _ in range(3):
        sim.step()
    manager, confirmed = sim.scheduler.block_manager, sequence.num_confirmed_tokens
    assert manager.is_published(sequence, confirmed)
    assert not manager.is_published(sequence, 7)  # the second block of 4 tokens is in flight
    manager.pool.hide(sequence.block_table[:2])
    assert not manager.is_published(sequence, confirmed)
    sim.restart(keeps_memory=True)
    assert manager.is_published(sequence, confirmed)
    sim.run()


def test_a_prefill_continues_after_its_confirmed_chunks() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sequence = sim.add(long_prompt(15), max_tokens=2)
    sim.send()
    sim.send()
    sim.receive()
    sim.send()
    assert (sequence.num_confirmed_tokens, sequence.num_planned_tokens) == (4, 12)
    sim.restart(keeps_memory=True)
    plan = sim.send()
    assert plan and plan.added[0].num_computed_tokens == 4
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == 8


def test_a_prompt_in_flight_is_not_found_in_the_cache() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=9, ignore_eos=True)
    sim.send()
    sim.add(long_prompt(9), max_tokens=9, ignore_eos=True)  # finds the blocks in flight
    sim.send()
    sim.restart(keeps_memory=True)
    plan = sim.send()
    assert plan and [row.num_computed_tokens for row in plan.added] == [0, 8]  # of this plan
    sim.run()


def test_a_second_death_hides_no_confirmed_block() -> None:
    sim = Simulation()
    sequence = sim.add(long_prompt(9), max_tokens=9, ignore_eos=True)
    for _ in range(3):
        sim.step()
    sim.restart(keeps_memory=True)
    sim.send()
    sim.restart(keeps_memory=True)
    assert (sequence.is_suspect, sequence.status) == (True, Status.WAITING)
    plan = sim.send()
    assert plan and plan.added[0].num_computed_tokens == 8
    sim.run()


def test_a_finished_prompt_is_found_after_a_death() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1)
    sim.run()
    sim.restart(keeps_memory=True)
    again = sim.add(long_prompt(9), max_tokens=1)
    sim.run()
    assert again.num_cached_tokens == 8


def test_a_row_that_ends_before_its_return_is_unknown_to_the_workers() -> None:
    sim = Simulation()
    sequences = [sim.add(long_prompt(4), max_tokens=9, ignore_eos=True) for _ in range(3)]
    for _ in range(3):
        sim.step()
    sim.restart(keeps_memory=True)
    sim.finish(sequences[0], "abort")
    sim.preempt(sequences[1])
    plan = sim.send()
    assert plan and not plan.removed
    sim.run()


def test_memory_that_is_lost_after_all_is_forgotten() -> None:
    sim = Simulation()
    sequence = sim.add(long_prompt(9), max_tokens=9, ignore_eos=True)
    for _ in range(4):
        sim.step()
    sim.restart(keeps_memory=True)
    sim.restart()
    assert sequence.status is Status.WAITING
    sim.run()


@settings(max_examples=60)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_plans=st.integers(1, 4),
    budget=st.integers(1, 40),
    deaths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=4),
    method=st.sampled_from(["none", "ngram", "mtp"]),
)
@example([1, 2, 14, 17], 1, 4, [(9, 0)], "none")  # a prompt and another one's output are equal
def test_at_most_what_was_in_flight_is_computed_again(
    prompts: list[int],
    num_plans: int,
    budget: int,
    deaths: list[tuple[int, int]],
    method: str,
) -> None:
    """With room for all: no suspects, for between two deaths each sequence gets a token."""
    sim = Simulation(
        num_blocks=400,
        max_model_len=60,
        computes_once=True,
        num_plans_in_flight=num_plans,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        speculative_method=method,
    )
    for number, length in enumerate(prompts):
        sim.add(([1, 2, 3] * 10)[:length], seed=number, max_tokens=25, ignore_eos=True)
    most = 0
    for num_steps, num_sent in deaths:
        while any(sim.num_deaths.values()) and sim.step():
            pass
        for _ in range(num_steps):
            sim.step()
        for _ in range(num_sent):
            sim.send()
        most += num_in_flight(sim)
        sim.restart(keeps_memory=True)
    sim.run()
    assert sim.scheduler.num_recomputed_tokens <= most
