"""Requests that kill workers: suspects, poison, and refusals."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.worker import WorkerState
from penstock.services.scheduler.process import SchedulerProcess
from penstock.services.scheduler.sequence import Sequence, Status
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.processes import NUM_BLOCKS, Gateway, request
from tests.services.scheduler.reference import LATE_POISON, POISON
from tests.services.scheduler.simulation import Simulation

# ---- Requests that kill workers, and others with them. A block has 4 tokens, the context 32 --


@pytest.mark.parametrize("num_plans", [1, 2, 4])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_poison_is_given_up_and_the_others_go_on(place: int, num_plans: int) -> None:
    """At the third death, whoever it came with: all that ran with it are right to the end."""
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


def step_until_runs(sim: Simulation, sequence: Sequence) -> None:
    for _ in range(10):
        if sequence in sim.scheduler.running:
            return
        sim.step()
    raise AssertionError("it is not admitted")


def test_suspects_are_tried_alone_until_their_first_token() -> None:
    sim = Simulation(max_num_seqs=8)
    one, two, three = [sim.add(max_tokens=9, ignore_eos=True) for _ in range(3)]
    die_twice(sim)
    assert sim.step().sequences == [one]  # type: ignore[union-attr]
    step_until_runs(sim, two)
    assert sim.scheduler.running == [two]
    sim.restart()
    assert sim.cut == {two}
    assert list(sim.scheduler.waiting) == [three, one]
    assert one.num_deaths == 0
    sim.run()


def test_request_without_deaths_waits_for_the_end_of_a_trial() -> None:
    """Another request might kill the workers; the suspect would be given up for it."""
    sim = Simulation()
    suspect = sim.add(max_tokens=9, ignore_eos=True)
    die_twice(sim)
    fresh = sim.add([POISON], max_tokens=9)
    sim.send()
    assert sim.scheduler.running == [suspect]
    sim.receive()
    sim.run()
    assert sim.cut == {fresh}


def test_suspect_that_comes_from_elsewhere_has_others_preempted() -> None:
    """Other requests continue after the suspect's first token, and lose no token."""
    sim = Simulation(num_blocks=64, max_num_seqs=8)
    others = [sim.add(long_prompt(6, first), max_tokens=9, ignore_eos=True) for first in (1, 9)]
    sim.step()
    sim.step()
    suspect = sim.add(max_tokens=9, ignore_eos=True, num_deaths=2)
    step_until_runs(sim, suspect)
    assert sim.scheduler.running == [suspect]
    assert list(sim.scheduler.waiting) == others
    sim.step()
    sim.step()
    assert sim.scheduler.running == [*others, suspect]
    sim.run()
    assert not sim.cut


moves = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([0, 0, 0, POISON, LATE_POISON]), st.integers(1, 12)),
    st.tuples(st.just("steps"), st.integers(1, 6), st.just(0)),
    st.tuples(
        st.sampled_from(["send", "receive", "abort", "preempt"]), st.integers(0, 9), st.just(0)
    ),
)


@settings(settings.get_profile("scheduler"))
@given(
    moves=st.lists(moves, min_size=3, max_size=30),
    num_plans=st.sampled_from([1, 2, 4]),
    max_tokens_per_step=st.sampled_from([3, 8, 32]),
)
def test_whatever_comes_in_whatever_order_exactly_the_poison_is_given_up(
    moves: list[tuple[str, int, int]], num_plans: int, max_tokens_per_step: int
) -> None:
    """Late poison, too, ends no request except itself.

    It is given up where the workers die before its first token is back.
    """
    sim = Simulation(
        num_blocks=64,
        max_num_seqs=8,
        num_plans_in_flight=num_plans,
        max_num_batched_tokens=max_tokens_per_step,
    )
    aborted = set()
    for move, number, length in moves:
        one: Any = sim.sequences[number % len(sim.sequences)] if sim.sequences else None
        if move == "add":
            prompt = [*long_prompt(length - 1, len(sim.sequences)), number]
            sim.add(prompt, max_tokens=5, ignore_eos=True)
        elif move == "steps":
            for _ in range(number):
                sim.step()
        elif move == "send":
            sim.send()
        elif move == "receive" and sim.has_result:
            sim.receive()
        elif move == "abort" and one and one.status is not Status.FINISHED:
            aborted.add(one)
            sim.finish(one, "abort")
        elif move == "preempt" and one and one.status is Status.RUNNING:
            sim.preempt(one)
    sim.run()
    poison = {one for one in sim.sequences if POISON in one.token_ids}
    late = {one for one in sim.sequences if LATE_POISON in one.token_ids}
    assert poison - aborted <= sim.cut <= poison | late | aborted


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_suspect_that_was_preempted_is_still_in_flight(num_chunks: int) -> None:
    """The plan of a preempted suspect may still kill the workers: no other suspect runs yet."""
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
    """The request has a slot, but its prefill follows that of the first one."""
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


# ---- Requests that the scheduler refuses for a while: those it has given up ------------------


POISON_TOKEN = 99
INNOCENT = [(1, 2, 3), (4, 5), (6,)]


def run_step(process: SchedulerProcess) -> None:
    """Make a plan; the workers die of it if it has poison, or its tokens come back."""
    scheduler = process.scheduler
    assert scheduler
    scheduler.schedule()
    if any(POISON_TOKEN in one.token_ids for step in scheduler.in_flight for one in step.sequences):
        restart_workers(process)
        return
    oldest = scheduler.in_flight[0]
    tokens = SampledTokens(scheduler.epoch, oldest.number, pack([5] * len(oldest.sampled)))
    scheduler.update(tokens)


def restart_workers(process: SchedulerProcess) -> None:
    process.group.lost(b"w")
    process.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
    process.start_group()


@pytest.mark.parametrize("pause", [1, 2, 3, 4, 5])
def test_only_what_was_given_up_is_refused(
    process: SchedulerProcess, gateway: Gateway, pause: int
) -> None:
    """Other poison comes while those that ran with the one before are suspects."""
    restart_workers(process)
    for number, prompt in enumerate(INNOCENT):
        process.accept(request(1, f"innocent {number}", prompt))
    poison = [f"poison {number}" for number in range(6)]
    for number, name in enumerate(poison):
        process.accept(request(1, name, (POISON_TOKEN, number)))
        for _ in range(pause):
            run_step(process)
    assert set(process.requests) >= {f"innocent {number}" for number in range(len(INNOCENT))}
    for _ in range(100):
        if not set(process.requests) & set(poison):
            break
        run_step(process)
    failed = gateway.failures(process)
    assert {one.request_id for one in failed if one.is_poison} == set(poison)
    for number, prompt in enumerate(INNOCENT):
        process.accept(request(2, f"again {number}", prompt))
    assert not gateway.failures(process)
    process.accept(request(2, "refused", (POISON_TOKEN, 0)))
    assert [one.request_id for one in gateway.failures(process)] == ["refused"]


def test_poison_whose_client_leaves_at_its_last_death_is_refused(
    process: SchedulerProcess, gateway: Gateway
) -> None:
    """The workers die of a plan that is in flight when the request is released."""
    restart_workers(process)
    process.accept(request(1, "poison", (POISON_TOKEN,)))
    run_step(process)
    run_step(process)
    assert process.scheduler
    process.scheduler.schedule()
    process.release("poison", 1)
    restart_workers(process)
    gateway.failures(process)
    process.accept(request(2, "again", (POISON_TOKEN,)))
    (refused,) = gateway.failures(process)
    assert refused.request_id == "again"
