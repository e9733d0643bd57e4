"""Drafts of multi-token prediction: how many are asked for, when, and what they save."""

from typing import Any

import msgspec
import pytest

from penstock.protocol.messages.plan import SampledTokens
from penstock.services.scheduler.draft_policy import PERIOD, PROBE, DraftPolicy
from penstock.services.scheduler.proposer import KNOWN, LayerProposer
from tests.services.scheduler.packed_plans import split
from tests.services.scheduler.reference import LOOP
from tests.services.scheduler.simulation import Simulation

MOST = 3


def speculating(**options: Any) -> Simulation:
    defaults = {"speculative_method": "mtp", "num_speculative_tokens": MOST, "max_num_seqs": 16}
    return Simulation(num_blocks=120, max_model_len=160, **defaults | options)


def test_a_plan_names_the_drafts_of_the_plan_before() -> None:
    sim = speculating(num_plans_in_flight=3)
    sequence = sim.add([1, 2, 3], seed=LOOP, max_tokens=30)
    sim.run()
    assert [plan.num_drafts for plan in sim.plans[:3]] == [MOST] * 3
    assert sim.plans[0].drafts == b""
    [(_, (position, [first, *drafts]))] = split(sim.plans[1].drafts)
    assert (position, first, len(drafts)) == (3, KNOWN, MOST)
    [(_, (position, [first, *drafts]))] = split(sim.plans[2].drafts)
    assert first == sequence.token_ids[position] and len(drafts) == MOST
    counted = sim.scheduler.draft_scheduler
    assert 0 < counted.num_accepted_tokens < counted.num_draft_tokens
    assert len(sim.plans) < 25
    assert not sim.scheduler.num_preemptions


@pytest.mark.parametrize("options", [{"speculative": False}, {"max_tokens": 1}])
def test_what_takes_no_drafts(options: dict[str, Any]) -> None:
    sim = speculating()
    sim.add([1, 2, 3], seed=LOOP, **{"max_tokens": 9} | options)
    sim.run()
    assert not any(plan.num_drafts or plan.drafts for plan in sim.plans)
    full = speculating(max_num_seqs=2)
    for _ in range(2):
        full.add([1, 2, 3], seed=LOOP, max_tokens=9)
    assert not any(plan.num_drafts for plan in full.run().plans[:-2])


def test_steps_are_measured_that_have_as_many_drafts_as_they_make() -> None:
    """A step of another number takes 10 s here, one with a prompt 100 s."""
    sim = speculating(num_plans_in_flight=1)
    scheduler = sim.scheduler.draft_scheduler
    policy = scheduler.policy
    assert policy
    choose, measure = policy.choose, policy.measure
    asked: list[tuple[int, int]] = []
    measured: list[tuple[int, int, float]] = []

    def chosen(num_others: int, acceptances: list[float]) -> int:
        asked.append((num_others, len(acceptances)))
        return choose(num_others, acceptances)

    def noted(num_sequences: int, number: int, seconds: float) -> None:
        measured.append((num_sequences, number, round(seconds, 3)))
        measure(num_sequences, number, seconds)

    policy.choose, policy.measure = chosen, noted  # type: ignore[method-assign]
    now, number_before = 0.0, 0
    for options in ({}, {"speculative": False}, {}):
        sim.add([1, 2, 3], seed=LOOP, max_tokens=150, **options)
        for _ in range(9):
            sim.step()
            plan = sim.plans[-1]
            usual = 1 + plan.num_drafts if plan.num_drafts == number_before else 10
            now, number_before = now + (100 if plan.chunks else usual), plan.num_drafts
            scheduler.on_tokens(now)
    assert set(asked) == {(0, 1), (1, 1), (1, 2)}
    assert {(sizes, number) for sizes, number, _ in measured} >= {(1, 0), (2, MOST), (3, 0)}
    assert all(seconds == 1 + number for _, number, seconds in measured)
    assert max(measured)[0] == 3
    sim.run()


@pytest.mark.parametrize("max_tokens", [60, 2])
def test_drafts_have_room_for_their_keys_and_no_more(max_tokens: int) -> None:
    """The layer writes no keys of the last one, nor after the end of the sequence."""
    sim = speculating(num_plans_in_flight=1)
    sequence = sim.add([1, 2, 3], seed=LOOP, max_tokens=max_tokens)
    most = 0
    while plan := sim.send():
        left = sequence.max_length - 1 - sequence.num_planned_tokens
        most = max(most, sequence.num_planned_tokens + max(0, min(plan.num_drafts - 1, left)))
        if sequence.block_table:
            assert 0 <= sequence.capacity - most < 4
        sim.receive()
    assert most == sequence.max_length - 1


def test_a_result_has_as_many_drafts_as_were_asked_for() -> None:
    sim = speculating()
    sim.add([1, 2, 3], max_tokens=9)
    sim.send()
    result = msgspec.msgpack.decode(sim.results.popleft(), type=SampledTokens)
    result.drafts = result.drafts[:-4]
    with pytest.raises(ValueError, match="got 2 drafts of step 0, expected 3 for each of 1 token"):
        sim.scheduler.update(result)


def run(
    policy: DraftPolicy,
    seconds: dict[int, float],
    num_steps: int,
    right: float,
    num_others: int = 0,
) -> list[int]:
    """Return the numbers that a policy chooses for 4 sequences, some of which get no drafts."""
    chosen = []
    for _ in range(num_steps):
        number = policy.choose(num_others, [right] * (4 - num_others))
        if chosen and number == chosen[-1]:
            policy.measure(4, number, seconds[number])
        chosen.append(number)
    return chosen


@pytest.mark.parametrize(
    ("seconds", "right", "expected"),
    [
        ({0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3}, 0.8, 3),
        ({0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5}, 0.8, 2),
        ({0: 1.0, 1: 2.0, 2: 2.5, 3: 3.0}, 0.8, 0),
        ({0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}, 0.1, 0),
    ],
)
def test_the_number_that_gives_most_tokens_a_second(
    seconds: dict[int, float], right: float, expected: int
) -> None:
    policy = DraftPolicy(MOST)
    assert [policy.choose(0, [right]) for _ in range(3)] == [MOST] * 3  # without measurements
    chosen = run(policy, seconds, 200, right)
    assert set(chosen[-100:]) == {expected}
    if expected:
        assert chosen[2 : PROBE + 4] == [*[0] * (PROBE + 1), expected]
        policy.measure(4, MOST, 1000.0)  # a machine that slept
        assert run(policy, seconds, 1, right) == [expected]
    # then it changes: the other extreme becomes three times as fast
    other = 0 if expected else MOST
    changed = seconds | {other: min(seconds.values()) / 3}
    chosen = run(policy, changed, 4 * PERIOD, right)
    assert chosen[-1] == other
    assert sum(number != other for number in chosen[-PERIOD:]) <= PROBE + 2


def test_sequences_without_drafts_make_their_steps_longer() -> None:
    seconds = {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}
    assert run(DraftPolicy(MOST), seconds, 60, 0.8)[-1] == MOST
    assert run(DraftPolicy(MOST), seconds, 60, 0.8, num_others=3)[-1] == 0


def test_drafts_are_of_the_last_known_token() -> None:
    proposer = LayerProposer([1, 2])
    proposer.accept_row()
    proposer.take([5, 6])
    assert proposer.num_drafts(has_row=True) == 2
    proposer.send([KNOWN])
    assert proposer.num_drafts(has_row=True) == 0
    proposer.accept_row()
    proposer.token_ids.append(9)
    proposer.check()
    assert proposer.num_drafts(has_row=True) == 0


def test_a_sequence_whose_drafts_are_wrong_gets_one() -> None:
    proposer = LayerProposer([1, 2])
    proposer.accept_row()
    for draft, expected in ((5, 1), (7, MOST)):  # wrong, then right again and again
        for _ in range(60):
            proposer.send([KNOWN, draft])
            proposer.accept_row()
            proposer.token_ids.append(7)
            proposer.check()
            if not proposer.accept_row():
                continue
            proposer.token_ids.append(8)
            proposer.check()
        proposer.take([1] * MOST)
        assert proposer.num_drafts(has_row=True) == expected
        assert proposer.num_drafts(has_row=False) == 0
