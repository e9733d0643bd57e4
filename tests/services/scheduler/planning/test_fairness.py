"""Turns of clients, priorities, and long prompts that wait for blocks, in the whole scheduler."""

from penstock.services.scheduler.sequence import MAX_PREEMPTIONS, Status
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.simulation import Simulation


def test_short_prompts_pass_one_that_waits_for_blocks_until_it_reserves_them() -> None:
    sim = Simulation(num_blocks=6)
    sim.add(long_prompt(12), max_tokens=4, ignore_eos=True)
    sim.step()
    long = sim.add(long_prompt(16, first=40), max_tokens=1)
    short = [sim.add(long_prompt(8, first=60 + 9 * n), max_tokens=1) for n in range(3)]
    while long.status is Status.WAITING:
        sim.step()
    assert [s.status for s in short] == [Status.FINISHED] * 2 + [Status.WAITING]
    sim.run()


def test_clients_take_turns() -> None:
    sim = Simulation(max_num_seqs=2)
    many = [sim.add(max_tokens=1, client="many") for _ in range(9)]
    one = sim.add(max_tokens=1, client="one")
    sim.send()
    assert [s.status for s in (*many[:2], one)] == [
        Status.DRAINING,
        Status.WAITING,
        Status.DRAINING,
    ]
    sim.run()


def test_lower_priority_values_go_first_in_one_client() -> None:
    sim = Simulation(max_num_seqs=1)
    last, middle, first = [sim.add(max_tokens=1, priority=one) for one in (5, 0, -5)]
    sim.step()
    assert (first.status, middle.status) == (Status.FINISHED, Status.DRAINING)
    assert last.status is Status.WAITING
    sim.run()


def test_the_highest_priority_value_is_preempted_when_blocks_run_out() -> None:
    sim = Simulation(num_blocks=4)
    old = sim.add(long_prompt(8), max_tokens=6, ignore_eos=True, priority=1)
    new = sim.add(long_prompt(4, first=40), max_tokens=6, ignore_eos=True)
    while not sim.scheduler.num_preemptions:
        sim.step()
    assert (old.status, new.status) == (Status.WAITING, Status.RUNNING)
    sim.run()


def test_a_sequence_preempted_often_is_preempted_no_more_for_its_priority() -> None:
    sim = Simulation(num_blocks=64)
    old = sim.add(max_tokens=20, ignore_eos=True, priority=1)
    sim.add(max_tokens=20, ignore_eos=True, client="other")
    for _ in range(MAX_PREEMPTIONS):
        sim.step()
        assert sim.scheduler.running[-1] is old
        sim.preempt(old)
        while old.status is Status.WAITING:
            sim.step()
    assert sim.scheduler.running[0] is old
    sim.run()
