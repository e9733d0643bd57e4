"""Features that few requests use: extras of their rows, logprobs of their prompts."""

from typing import Any

import pytest

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import TokenizedRequest
from penstock.protocol.messages.plan import RowExtras, SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.scheduler.in_flight_plan import row_of
from penstock.services.scheduler.sequence import CannotFitError, Sequence
from penstock.services.scheduler.streams import _opened
from tests.services.scheduler.builders import long_prompt, make_sequence
from tests.services.scheduler.reference import EOS, logprobs_at
from tests.services.scheduler.simulation import Simulation

ASKING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "presence": ({"presence_penalty": 0.5}, {}),
    "frequency": ({"frequency_penalty": -0.5}, {}),
    "repetition": ({"repetition_penalty": 1.5}, {}),
    "bias": ({"logit_bias": {7: -1.0}}, {"logit_bias": {7: -1.0}}),
    "min_tokens": ({"min_tokens": 2}, {"min_tokens": 2}),
    "logprobs": ({"logprobs": 0}, {"num_logprobs": 0}),
    "prompt_logprobs": ({"prompt_logprobs": 5}, {"num_prompt_logprobs": 5}),
    "allowed": ({"allowed_token_ids": [7, 5]}, {"allowed_token_ids": [7, 5]}),
    "grammar": (
        {"structured_outputs": StructuredOutputs(regex="a")},
        {"structured_outputs": StructuredOutputs(regex="a")},
    ),
}


@pytest.mark.parametrize(("sampling", "extras"), ASKING.values(), ids=ASKING)
def test_extras_of_a_row_that_asks(sampling: dict[str, Any], extras: dict[str, Any]) -> None:
    sequence = make_sequence((5, 6), (7,), stop_token_ids=[9, 8], **sampling)
    expected = RowExtras(2, end_token_ids=[EOS, 8, 9], **extras)
    assert row_of(sequence).extras == expected


@pytest.mark.parametrize("repetition_penalty", [None, 1.0])
def test_a_row_that_asks_for_nothing_has_no_extras(repetition_penalty: float | None) -> None:
    sequence = make_sequence((5, 6), repetition_penalty=repetition_penalty, stop_token_ids=[9])
    assert row_of(sequence).extras is None


@pytest.mark.parametrize(("grammar", "ends"), [(None, [9]), (StructuredOutputs(regex="a"), [0, 9])])
def test_a_grammar_has_an_end(grammar: StructuredOutputs | None, ends: list[int]) -> None:
    """EOS ends it whatever the request says: there may be nothing else to draw."""
    sequence = make_sequence(
        ignore_eos=True, stop_token_ids=[9], structured_outputs=grammar, min_tokens=1
    )
    extras = row_of(sequence).extras
    assert extras
    assert extras.end_token_ids == sorted(sequence.stop_token_ids) == ends


def test_bad_words_come_as_the_tokenizer_has_encoded_them() -> None:
    sampling = SamplingParams(bad_words=["ab"])
    request = TokenizedRequest("r", 0, sampling, pack([5]), bad_words=[[97, 98], [3]])
    sequence = Sequence(request, frozenset())
    expected = RowExtras(1, bad_words=[[97, 98], [3]])
    assert row_of(sequence).extras == expected


def test_an_allowed_token_that_no_model_has_ends_no_worker() -> None:
    sequence = make_sequence((5, 6), allowed_token_ids=[7, 264])
    with pytest.raises(
        CannotFitError, match="allowed_token_ids: got token id 264, expected up to 263"
    ):
        sequence.check(264)
    make_sequence((5, 6), allowed_token_ids=[7, 263]).check(264)


# ---- logprobs --------------------------------------------------------------------------------


def asked_for(sim: Simulation) -> list[int]:
    """Return the prompt logprobs that each plan's first row requests; -1: none."""
    rows = [plan.added[0] for plan in sim.plans if plan.added]
    return [row.extras.num_prompt_logprobs if row.extras else -1 for row in rows]


def test_a_prompt_without_a_token_is_refused() -> None:
    with pytest.raises(CannotFitError, match="prompt: got no token"):
        make_sequence(()).check(264)


def test_prompt_logprobs_take_nothing_from_the_cache_and_publish() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1, prompt_logprobs=1)
    asking = sim.add(long_prompt(9), max_tokens=1, prompt_logprobs=1)
    silent = sim.add(long_prompt(9), max_tokens=1)
    sim.run()
    assert (asking.num_cached_tokens, silent.num_cached_tokens) == (0, 8)
    assert len(asking.prompt_logprobs or []) == 8


def test_prompt_logprobs_begin_anew_until_they_are_complete() -> None:
    """Preempted or without workers, in the middle of the prompt; after the prompt they are kept."""
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


# ---- rows without a token --------------------------------------------------------------------


def test_a_row_without_a_token_fails_alone_and_hides_its_blocks() -> None:
    """Keys and values that may be NaN are for nobody: the next request computes its prompt."""
    sim = Simulation(num_plans_in_flight=1)
    bad = sim.add(long_prompt(9), max_tokens=5, logprobs=0)
    good = sim.add(long_prompt(9, first=40), max_tokens=5, logprobs=0)
    scheduler = sim.scheduler
    assert scheduler.schedule()
    (step,) = scheduler.in_flight
    token_ids = [7 if sequence is good else -1 for sequence in step.sampled]
    logprobs = [(index, logprobs_at([7], 0)) for index in range(2)]
    failed = [(step.sampled.index(bad), "NaN")]
    tokens = SampledTokens(0, step.number, pack(token_ids), logprobs, failed=failed)
    output = scheduler.update(tokens)
    assert output.failed == [(bad, "NaN")]
    assert (bad.logprobs, good.logprobs) == ([], [logprobs_at([7], 0)])
    assert (output.sequences, output.token_ids) == ([good], [7])
    assert bad.finish_reason == "abort"
    assert good.output_token_ids == [7]
    again, like_good = make_sequence(long_prompt(9)), make_sequence(long_prompt(9, first=40))
    for sequence in again, like_good:
        scheduler.add(sequence)
    assert scheduler.schedule()
    assert (again.num_cached_tokens, like_good.num_cached_tokens) == (0, 8)


def test_a_void_guess_without_a_token_fails_nobody() -> None:
    """The rows after a wrong guess are thrown away."""
    sim = Simulation(num_plans_in_flight=1, speculative_method="ngram")
    sequence = sim.add([1, 2, 3, 4] * 6, max_tokens=40, ignore_eos=True)
    scheduler = sim.scheduler
    for _ in range(20):
        assert scheduler.schedule()
        (step,) = scheduler.in_flight
        wrong = sequence.token_ids[-4] % 7 + 100  # no guess
        token_ids = [sequence.token_ids[-4] for _ in step.sampled]
        failed: list[tuple[int, str]] = []
        if len(step.sampled) > 1:
            token_ids = [wrong] + [-1] * (len(step.sampled) - 1)
            failed = [(index, "NaN") for index in range(1, len(token_ids))]
        output = scheduler.update(SampledTokens(0, step.number, pack(token_ids), failed=failed))
        assert output.failed == []
        if failed:
            assert sequence.token_ids[-1] == wrong
            return
    raise AssertionError("nothing was guessed")


def test_a_grammar_knows_how_its_answer_begins() -> None:
    """The detokenizer learns whether the text begins with reasoning.

    Rows without a grammar pay nothing.
    """
    sequence = make_sequence(structured_outputs=StructuredOutputs(regex="a"))
    sequence.reasoning = "open"
    extras = row_of(sequence).extras
    assert extras
    assert extras.reasoning == "open"
    plain = make_sequence()
    plain.reasoning = "open"
    assert row_of(plain).extras is None
    assert [_opened(one).starts_reasoning for one in (plain, make_sequence())] == [True, False]
