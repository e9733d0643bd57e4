"""Drafts of multi-token prediction: how many are asked for, when, and what they save."""

from typing import Any

import pytest

from penstock.services.scheduler.draft_policy import PERIOD, PROBE, DraftPolicy
from penstock.services.scheduler.proposer import KNOWN, LayerProposer
from tests.services.scheduler.packed_plans import split
from tests.services.scheduler.reference import LOOP
from tests.services.scheduler.simulation import Simulation

MOST = 3


def speculating(**options: Any) -> Simulation:
    defaults = {"speculative_method": "mtp", "num_speculative_tokens": MOST, "max_num_seqs": 16}
    return Simulation(num_blocks=40, max_model_len=100, **defaults | options)


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


def run(policy: DraftPolicy, seconds: dict[int, float], num_steps: int, right: float) -> list[int]:
    """Return the numbers that a policy chooses for 4 sequences."""
    chosen = []
    for _ in range(num_steps):
        number = policy.choose(0, [right] * 4)
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
    # then it changes: the other extreme becomes three times as fast
    other = 0 if expected else MOST
    changed = seconds | {other: min(seconds.values()) / 3}
    chosen = run(policy, changed, 4 * PERIOD, right)
    assert chosen[-1] == other
    assert sum(number != other for number in chosen[-PERIOD:]) <= PROBE + 2


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
