"""Requests that kill workers, and those beside them. A block has 4 tokens, the context 32."""

import pytest

from penstock.services.scheduler.sequence import Status
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.reference import POISON
from tests.services.scheduler.simulation import Simulation


@pytest.mark.parametrize("num_plans", [1, 2, 4])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_poison_is_given_up_and_the_others_go_on(place: int, num_plans: int) -> None:
    """At the third death, whoever it came with: all that ran beside it are right to the end."""
    sim = Simulation(num_blocks=64, max_num_seqs=8, num_plans_in_flight=num_plans)
    for number in range(8):
        first = POISON if number == place else number
        sim.add([first, *long_prompt(6)], max_tokens=9, ignore_eos=True)
    sim.run()
    assert sim.cut == {sim.sequences[place]}
    assert sim.scheduler.epoch == 1 + 3


def test_two_poisons_cost_a_death_more() -> None:
    """The first two deaths count for both; then each is tried by itself."""
    sim = Simulation(num_blocks=64)
    one, _, other = [sim.add([first, 2], max_tokens=9) for first in (POISON, 1, POISON)]
    sim.run()
    assert sim.cut == {one, other}
    assert sim.scheduler.epoch == 1 + 4


def die_twice(sim: Simulation) -> None:
    for _ in range(2):
        sim.send()
        sim.restart()


def test_suspects_are_tried_one_at_a_time_until_their_first_token() -> None:
    sim = Simulation(max_num_seqs=8)
    one, two, three = [sim.add(max_tokens=9, ignore_eos=True) for _ in range(3)]
    die_twice(sim)
    assert not sim.step().sequences[1:]  # type: ignore[union-attr]
    sim.send()
    assert sim.scheduler.running == [one, two]
    sim.restart()
    assert sim.cut == {two}
    assert list(sim.scheduler.waiting) == [one, three]
    sim.run()


def test_request_without_deaths_runs_beside_a_suspect() -> None:
    sim = Simulation()
    suspect = sim.add(max_tokens=9, ignore_eos=True)
    die_twice(sim)
    fresh = sim.add(max_tokens=9, ignore_eos=True)
    sim.send()
    assert sim.scheduler.running == [suspect, fresh]
    sim.restart()
    assert sim.cut == {suspect}
    sim.run()


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_suspect_that_was_preempted_is_still_in_flight(num_chunks: int) -> None:
    """Its plan may kill the workers yet: no other suspect may run beside it."""
    sim = Simulation(max_num_batched_tokens=8, num_plans_in_flight=3)
    length = 4 * num_chunks + 3
    preempted, other = [sim.add(long_prompt(length, first), max_tokens=9) for first in (1, 40)]
    for _ in range(2):
        sim.send()
        sim.send()
        sim.restart()
    sim.send()
    sim.preempt(preempted)
    sim.send()
    assert not sim.scheduler.running
    sim.restart()
    assert sim.cut == {preempted}
    sim.run()
    assert other.num_deaths == 0


def test_suspect_that_was_aborted_is_still_in_flight() -> None:
    sim = Simulation(num_plans_in_flight=3)
    aborted, other = [sim.add(max_tokens=9, ignore_eos=True) for _ in range(2)]
    die_twice(sim)
    sim.send()
    sim.finish(aborted, "abort")
    sim.send()
    assert not sim.scheduler.running
    sim.restart()
    assert (aborted.finish_reason, sim.cut) == ("abort", {aborted})
    assert sim.num_deaths[other] == 2
    sim.run()


def test_a_token_clears_a_suspect() -> None:
    sim = Simulation()
    sim.add(max_tokens=9, ignore_eos=True)
    for _ in range(3):
        die_twice(sim)
        sim.step()
    sim.run()
    assert not sim.cut


def test_draining_sequence_counts_deaths() -> None:
    sim = Simulation()
    sequence = sim.add(max_tokens=1)
    die_twice(sim)
    sim.send()
    assert sequence.status is Status.DRAINING
    sim.restart()
    assert sequence.finish_reason == "abort"
    sim.run()


def test_request_with_nothing_in_flight_is_at_no_death() -> None:
    """It has a slot, but its prefill is behind that of the one that came first."""
    sim = Simulation(max_num_batched_tokens=8, num_plans_in_flight=1)
    sim.add(max_tokens=2, ignore_eos=True)
    between = sim.add(long_prompt(9), max_tokens=9)
    sim.step()
    assert between.status is Status.RUNNING
    sim.restart()
    assert between.num_deaths == 0
    sim.run()


def test_waiting_request_is_at_no_death() -> None:
    sim = Simulation(max_num_seqs=1)
    _, waiting = [sim.add(max_tokens=3, ignore_eos=True) for _ in range(2)]
    die_twice(sim)
    assert waiting.num_deaths == 0
    sim.run()
