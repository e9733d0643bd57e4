"""What few requests ask for: extras of their rows, logprobs of their prompts."""

from typing import Any

import pytest

from penstock.protocol.plan import RowExtras
from penstock.protocol.structured import StructuredOutputs
from tests.services.scheduler.builders import long_prompt, make_sequence
from tests.services.scheduler.reference import EOS
from tests.services.scheduler.simulation import Simulation

ASKING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "presence": ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    "frequency": ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "bias": ({"logit_bias": {7: -1.0}}, {"logit_bias": {7: -1.0}}),
    "min_tokens": ({"min_tokens": 2}, {"min_tokens": 2}),
    "logprobs": ({"logprobs": 0}, {"num_logprobs": 0}),
    "prompt_logprobs": ({"prompt_logprobs": 5}, {"num_prompt_logprobs": 5}),
    "grammar": (
        {"structured_outputs": StructuredOutputs(regex="a")},
        {"structured_outputs": StructuredOutputs(regex="a")},
    ),
}


@pytest.mark.parametrize(("sampling", "extras"), ASKING.values(), ids=ASKING)
def test_extras_of_a_row_that_asks(sampling: dict[str, Any], extras: dict[str, Any]) -> None:
    sequence = make_sequence((5, 6), (7,), stop_token_ids=[9, 8], **sampling)
    expected = RowExtras(2, end_token_ids=[EOS, 8, 9], **extras)
    assert sequence.as_row().extras == expected


@pytest.mark.parametrize("repetition_penalty", [None, 1.0])
def test_a_row_that_asks_for_nothing_has_no_extras(repetition_penalty: float | None) -> None:
    sequence = make_sequence((5, 6), repetition_penalty=repetition_penalty, stop_token_ids=[9])
    assert sequence.as_row().extras is None


@pytest.mark.parametrize(("grammar", "ends"), [(None, [9]), (StructuredOutputs(regex="a"), [0, 9])])
def test_a_grammar_has_an_end(grammar: StructuredOutputs | None, ends: list[int]) -> None:
    """EOS ends it whatever the request says: there may be nothing else to draw."""
    sequence = make_sequence(
        ignore_eos=True, stop_token_ids=[9], structured_outputs=grammar, min_tokens=1
    )
    extras = sequence.as_row().extras
    assert extras
    assert extras.end_token_ids == sorted(sequence.stop_token_ids) == ends


# ---- logprobs --------------------------------------------------------------------------------


def asked_for(sim: Simulation) -> list[int]:
    """What each plan's first row asks for of its prompt; -1: nothing."""
    rows = [plan.added[0] for plan in sim.plans if plan.added]
    return [row.extras.num_prompt_logprobs if row.extras else -1 for row in rows]


def test_prompt_logprobs_take_nothing_from_the_cache_and_publish() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1, prompt_logprobs=1)
    asking = sim.add(long_prompt(9), max_tokens=1, prompt_logprobs=1)
    silent = sim.add(long_prompt(9), max_tokens=1)
    sim.run()
    assert (asking.num_cached_tokens, silent.num_cached_tokens) == (0, 8)
    assert len(asking.prompt_logprobs or []) == 8


def test_prompt_logprobs_begin_anew_until_they_are_complete() -> None:
    """Preempted or without workers, in the middle of the prompt; behind it they are kept."""
    sim = Simulation(max_num_batched_tokens=4, num_plans_in_flight=1)
    sequence = sim.add(long_prompt(9), max_tokens=9, ignore_eos=True, prompt_logprobs=2)
    sim.step()
    sim.preempt(sequence)
    sim.step()
    sim.restart()
    for _ in range(3):
        sim.step()
    assert not sequence.needs_prompt_logprobs
    sim.preempt(sequence)
    sim.step()
    sim.restart()
    sim.run()
    assert asked_for(sim) == [2, 2, 2, -1, -1]


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    sim = Simulation()
    sequence = sim.add((1,), max_tokens=1, prompt_logprobs=2)
    sim.run()
    assert asked_for(sim) == [-1]
    assert sequence.prompt_logprobs == []
