"""Steps within a time: chunks of prompts on machines whose seconds are given."""

from typing import Any

import pytest

from penstock.services.scheduler.blocks import state_blocks
from penstock.services.scheduler.scheduler import NUM_TURNS
from penstock.services.scheduler.sequence import Sequence, count_death
from penstock.services.scheduler.step_costs import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    MAX_SECONDS,
    SHARE,
    StepShape,
)
from tests.services.scheduler.builders import long_prompt, make_sequence
from tests.services.scheduler.packed_plans import pairs
from tests.services.scheduler.reference import EOS, LOOP
from tests.services.scheduler.simulation import Simulation


def machine(shape: StepShape) -> float:
    """Take 1 ms for a token, 1 ms more at position 1,000, and 20 ms for a row of logits."""
    per_token = shape.num_tokens + shape.num_keys / 1000 + 20 * shape.num_logits
    return (5 + shape.num_decoding + per_token) / 1000


def timed(**options: Any) -> Simulation:
    sizes = {"num_blocks": 2000, "max_model_len": 2000, "max_num_seqs": 8}
    sizes |= {"max_num_batched_tokens": 1024, "num_plans_in_flight": 1}
    return Simulation(machine=machine, **sizes | options)


def learn(sim: Simulation) -> Sequence:
    """Return a stream, beside which prompts were computed."""
    stream = sim.add(max_tokens=500, ignore_eos=True)
    for number in range(20):
        sim.step()
        sim.add(long_prompt(150, 1000 * (number + 2)), max_tokens=1)
        sim.step()
    while sim.scheduler.waiting or len(sim.scheduler.running) > 1:
        sim.step()
    return stream


def test_a_long_prompt_does_not_lengthen_the_steps_of_a_stream() -> None:
    sim = timed(target_itl_ms=100)
    stream = learn(sim)
    before, num_tokens = len(sim.shapes), len(stream.token_ids)
    sequence = sim.add(long_prompt(1200), max_tokens=1)
    while not sequence.finish_reason:
        sim.step()
    shapes = [shape for shape in sim.shapes[before:] if shape.num_tokens]
    seconds = sorted(map(machine, shapes))
    assert seconds[-1] <= 0.14 and seconds[len(seconds) * 3 // 4] <= 0.1
    assert sum(seconds) > 0.07 * len(seconds), "the time is used"
    assert shapes[0].num_tokens > 1.5 * shapes[-2].num_tokens, "later tokens take longer"
    assert len(stream.token_ids) - num_tokens >= len(shapes) - 1, "a token in each step"
    sim.finish(stream, "abort")
    sim.run()


@pytest.mark.parametrize("target", [0, 100])
def test_rows_of_logits_are_bounded(target: int) -> None:
    """All at once would take 16 s."""
    sim = timed(target_itl_ms=target)
    stream = learn(sim)
    before = len(sim.shapes)
    sequence = sim.add(long_prompt(800), max_tokens=1, prompt_logprobs=0)
    while not sequence.finish_reason:
        sim.step()
    rows = [shape.num_logits for shape in sim.shapes[before:] if shape.num_tokens]
    assert rows[0] == FIRST_TOKENS, "nothing is known of them"
    assert max(rows) <= FIRST_TOKENS
    assert min(rows[1:-1]) >= LEAST_TOKENS
    assert sum(rows) == 800
    sim.finish(stream, "abort")
    sim.run()


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """Nor for two; both long ones get on, and end."""
    sim = timed(target_itl_ms=100)
    stream = learn(sim)
    longs = [sim.add(long_prompt(1900, 1 + 4000 * n), max_tokens=1) for n in range(2)]
    for _ in range(2):  # they are new themselves
        sim.step()
    planned = [sequence.num_planned_tokens for sequence in longs]
    for number in range(NUM_TURNS // 2):
        short = sim.add(long_prompt(12, 10_000 + 100 * number), max_tokens=1)
        for _ in range(2):
            sim.step()
        assert len(short.token_ids) == 13
    for sequence, before in zip(longs, planned, strict=True):
        assert sequence.num_planned_tokens >= before + LEAST_TOKENS
    assert not any(sequence.finish_reason for sequence in longs)
    while not longs[1].finish_reason:
        sim.step()
    assert longs[0].finish_reason
    sim.finish(stream, "abort")
    sim.run()


def test_turns_are_for_short_ones_that_have_begun_then_for_new_ones_then_for_long_ones() -> None:
    """In one turn the first prompt comes first, in another one the second. Both are long."""
    sim = timed(target_itl_ms=100)
    stream = learn(sim)
    first, second = (sim.add(long_prompt(1900, 1 + 4000 * n), max_tokens=1) for n in range(2))
    for _ in range(2):
        sim.step()
    found = set()
    begun = None
    for number in range(4 * NUM_TURNS):
        new = sim.add(long_prompt(300, 20_000 + 400 * number), max_tokens=1)
        prompts = {"first": first, "second": second, "new": new}
        prompts |= {"begun": begun} if begun else {}
        before = {name: prompt.num_planned_tokens for name, prompt in prompts.items()}
        turn = sim.scheduler.num_steps % NUM_TURNS
        sim.step()
        first_name = max(prompts, key=lambda name: prompts[name].num_planned_tokens - before[name])
        found.add((turn, begun is not None, first_name))
        if begun:
            sim.finish(begun, "abort")
        keeps = not begun and new.num_planned_tokens > 50  # it is short
        begun = new if keeps else None
        if not keeps:
            sim.finish(new, "abort")
    names = {0: "first", NUM_TURNS // 2: "second"}
    for turn, is_begun, name in found:
        short = "begun" if is_begun else "new"
        assert name == (short if is_begun and turn else names.get(turn, short))
    assert {turn for turn, *_ in found} == {*range(NUM_TURNS)}
    sim.finish(stream, "abort")
    sim.run()


def test_a_long_prompt_ends_whatever_else_comes() -> None:
    sim = timed(target_itl_ms=100)
    stream = learn(sim)
    sequence = sim.add(long_prompt(600), max_tokens=1)
    num_steps = 0
    while not sequence.finish_reason:
        sim.add(long_prompt(300, 5000 + 400 * num_steps), max_tokens=1)
        sim.step()
        num_steps += 1
    assert num_steps < 6 * NUM_TURNS
    sim.finish(stream, "abort")


@pytest.mark.parametrize("target", [1, 35])
def test_without_time_for_two_chunks_prompts_take_turns(target: int) -> None:
    """The target is shorter than a step that only decodes, or than one with 32 tokens."""
    sim = timed(target_itl_ms=target)
    stream = learn(sim)
    longs = [sim.add(long_prompt(600, 1 + 800 * number), max_tokens=1) for number in range(3)]
    for _ in longs:  # they are new themselves
        sim.step()
    before = len(sim.shapes), longs[0].num_planned_tokens
    for number in range(NUM_TURNS // 2):
        short = sim.add(long_prompt(12, 5000 + 100 * number), max_tokens=1)
        for _ in range(2):
            sim.step()
        assert len(short.token_ids) == 13
    tokens = [shape.num_tokens for shape in sim.shapes[before[0] :]]
    assert LEAST_TOKENS <= min(tokens) <= sorted(tokens)[-2] < 2 * LEAST_TOKENS
    assert longs[0].num_planned_tokens >= before[1] + LEAST_TOKENS
    while not longs[2].finish_reason:
        sim.step()
    sim.finish(stream, "abort")
    sim.run()


def test_the_smallest_chunk_of_a_hybrid_model_is_computed_in_any_case() -> None:
    sim = timed(target_itl_ms=1, num_state_blocks=20)
    stream = sim.add(max_tokens=500, ignore_eos=True)
    first = sim.add(long_prompt(300), max_tokens=1)
    for _ in range(8):
        sim.step()
    assert first.finish_reason
    sim.finish(stream, "abort")


def test_the_target_counts_beside_streams_only() -> None:
    """Also where all of them wait for their drafts."""
    options = {"speculative_method": "ngram", "num_plans_in_flight": 2}
    sim = timed(target_itl_ms=100, max_num_batched_tokens=150, **options)
    stream = sim.add([1, 2, 3] * 100, seed=LOOP, max_tokens=99, ignore_eos=True)
    sim.step()
    assert sim.scheduler.in_flight[-1].shape.limit == MAX_SECONDS
    while not stream.is_paused:
        sim.step()
    sim.add(long_prompt(600, 5000))
    sim.send()
    shape = sim.scheduler.in_flight[-1].shape
    assert (shape.limit, shape.num_decoding) == (SHARE * 0.1, 0)
    assert shape.num_tokens


def test_equal_prompts_are_computed_once() -> None:
    """The worker asserts it: the second prompt waits for the blocks of the first one."""
    sim = timed(target_itl_ms=100, computes_once=True)
    stream = learn(sim)
    first, second = [sim.add([*long_prompt(700), n], max_tokens=1) for n in (5, 6)]
    other = sim.add(long_prompt(20, 90_000), max_tokens=1)
    while not second.finish_reason:
        sim.step()
    assert first.finish_reason and other.finish_reason
    assert second.num_cached_tokens == 700
    sim.finish(stream, "abort")


@pytest.mark.parametrize(
    ("options", "sampling"), [({"enable_prefix_caching": False}, {}), ({}, {"prompt_logprobs": 0})]
)
def test_a_prompt_that_shares_no_blocks_does_not_wait_for_them(
    options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    sim = timed(target_itl_ms=100, **options)
    stream = learn(sim)
    first = sim.add(long_prompt(900), max_tokens=1)
    sim.step()
    second = sim.add(long_prompt(900), max_tokens=1, **sampling)
    sim.step()
    sim.step()
    assert second.num_planned_tokens > 0
    assert not first.finish_reason
    sim.finish(stream, "abort")


def test_a_prompt_with_another_beginning_does_not_wait() -> None:
    """Though its tokens at the long prompt's next block are equal."""
    sim = timed(target_itl_ms=100)
    stream = learn(sim)
    first = sim.add(long_prompt(1900), max_tokens=1)
    sim.step()
    second = sim.add([7, *long_prompt(1900)[1:]], max_tokens=1)
    sim.step()
    assert second.num_planned_tokens > 0
    assert not first.finish_reason
    sim.finish(stream, "abort")


def test_a_short_prompt_does_not_wait_for_the_blocks_of_a_long_one() -> None:
    """The long one waits for short ones. A long prompt waits for it, and others pass that."""
    sim = timed(target_itl_ms=100)
    stream = learn(sim)
    first = sim.add(long_prompt(1900), max_tokens=1)
    for _ in range(2):
        sim.step()
    known = first.num_planned_tokens
    short = sim.add([*long_prompt(known + 20), 5], max_tokens=1)
    longer = sim.add([*long_prompt(500), 5], max_tokens=1)
    while sim.scheduler.num_steps % NUM_TURNS in (0, NUM_TURNS // 2):
        sim.step()
    sim.step()
    assert short.num_planned_tokens == known + 21
    for number in range(6):  # more tokens than the prompt that waits
        other = sim.add(long_prompt(120, 20_000 + 200 * number), max_tokens=1)
        while not other.finish_reason:
            sim.step()
        assert longer in sim.scheduler.waiting
    while not longer.finish_reason:
        sim.step()
    assert longer.num_cached_tokens == 500
    sim.finish(stream, "abort")


@pytest.mark.parametrize("clients", ["u", "abcd"])
def test_any_number_of_prompts_that_wait_for_blocks_is_passed(clients: str) -> None:
    """Also by their own client's requests, and by one that lacks blocks."""
    sim = timed(target_itl_ms=100, num_blocks=520)
    stream = learn(sim)
    first = sim.add(long_prompt(1000), max_tokens=1, client="first")
    sim.step()
    awaiting = [
        sim.add([*long_prompt(900), 5 + 10 * n, n], max_tokens=1, client=client)
        for n in range(2)
        for client in clients
    ]
    sim.step()
    held = sim.add(long_prompt(1900, 30_000), max_tokens=1, client="held")
    short = sim.add(long_prompt(12, 50_000), max_tokens=1, client=clients[-1])
    while not short.finish_reason:
        sim.step()
    assert first.num_unplanned_tokens > 500
    assert all(sequence in sim.scheduler.waiting for sequence in [*awaiting, held])
    sim.finish(first, "abort")  # then another one computes the prefix
    while not all(sequence.finish_reason for sequence in [*awaiting, held]):
        sim.step()
    assert [sequence.num_cached_tokens for sequence in awaiting].count(900) >= len(awaiting) - 1
    sim.finish(stream, "abort")


def test_a_prompt_does_not_wait_for_blocks_that_are_cached() -> None:
    """A short prompt has computed more than the long one."""
    sim = timed()
    sim.add([*long_prompt(160), 5], max_tokens=1)
    sim.run()
    long = make_sequence(long_prompt(1900))
    long.num_prefill_tokens, long.num_planned_tokens = 1900, 121
    shared_end = sim.scheduler.block_manager.shared_end
    for number, end in ((120, 0), (160, 0), (164, 164), (200, 200), (1900, 1900)):
        assert shared_end(make_sequence([*long_prompt(number), *[7] * 40]), long) == end
    other = make_sequence([*long_prompt(200), *[7] * 40], cache_salt="other")
    assert shared_end(other, long) == 0


def test_a_prompt_waits_for_a_checkpoint_and_not_for_blocks_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model with recurrent state has a checkpoint before the last message only."""
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", 16)
    monkeypatch.setattr(state_blocks, "MIN_SAVED", 64)
    sim = timed(target_itl_ms=100, num_state_blocks=40)
    stream = learn(sim)
    before = [*long_prompt(639), EOS]
    first = sim.add([*before, *long_prompt(400, 5000), EOS, 3], max_tokens=1)
    sim.step()
    assert 640 in first.checkpoints and first.num_planned_tokens < 500
    other = sim.add([*before[:500], *long_prompt(400, 7000)], max_tokens=1)
    second = sim.add([*before, *long_prompt(400, 6000), EOS, 3], max_tokens=1)
    sim.step()
    assert other in sim.scheduler.running
    while not second.finish_reason:
        sim.step()
    assert second.num_cached_tokens == 640
    sim.finish(stream, "abort")


def test_the_end_of_a_long_prompt_waits_for_new_short_ones() -> None:
    sim = timed(target_itl_ms=100)
    stream = learn(sim)
    long = sim.add(long_prompt(1900), max_tokens=1)
    sim.step()
    while long.num_unplanned_tokens > 150 or sim.scheduler.num_steps % NUM_TURNS == NUM_TURNS // 2:
        sim.step()
    before = long.num_planned_tokens
    assert sim.scheduler.num_steps % NUM_TURNS and before < 1850, "it takes more steps"
    short = sim.add(long_prompt(200, 90_000), max_tokens=1)
    sim.step()
    assert short.num_planned_tokens > 30
    assert long.num_planned_tokens == before
    sim.finish(stream, "abort")


def test_after_a_worker_s_death_chunks_are_short_again() -> None:
    sim = timed()
    learn(sim)
    sim.add(long_prompt(1000), max_tokens=1)
    plan = sim.send()
    assert plan is not None
    assert pairs(plan.chunks)[0][1] > FIRST_TOKENS
    sim.restart(keeps_memory=True)
    plan = sim.send()
    assert plan is not None
    assert sum(number for _, number in pairs(plan.chunks)) <= FIRST_TOKENS


def test_after_a_death_a_stream_continues_before_an_older_long_prompt() -> None:
    """The stream has one token to compute, though its own prompt was long."""
    sim = timed(target_itl_ms=100, keeps_memory=True)
    learn(sim)
    first = sim.add(long_prompt(1900), max_tokens=1)
    stream = sim.add(long_prompt(700, 4000), max_tokens=50, ignore_eos=True)
    while len(stream.token_ids) == 700:
        sim.step()
    assert first.num_unplanned_tokens > 200
    sim.restart(keeps_memory=True)
    sim.step()  # the turn of the oldest prompt
    sim.add(long_prompt(300, 8000), max_tokens=1)
    sim.send()
    assert stream in sim.scheduler.in_flight[-1].sampled


# ---- A slow step is not poison ---------------------------------------------------------------


def test_a_prompt_that_gets_on_between_deaths_is_no_poison() -> None:
    """Each death counts, until the prompt is further than it was at the death."""
    sim = timed(max_num_batched_tokens=64, keeps_memory=True)
    sequence = sim.add(long_prompt(1400), max_tokens=3, ignore_eos=True)
    for _ in range(6):
        sim.step()
        sim.send()
        sim.restart(keeps_memory=True)
        assert sequence.num_deaths == 1
        sim.step()
        assert sequence.num_deaths == 1, "as far as before"
        sim.step()
        assert sequence.num_deaths == 0
    sim.run()
    assert not sim.cut


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_a_prompt_that_kills_at_a_position_is_poison(keeps_memory: bool) -> None:
    """Tokens that are computed again after a death are no progress, nor after one before them."""
    sim = timed(max_num_batched_tokens=64)
    sequence = sim.add(long_prompt(600), max_tokens=1)
    num_deaths = 0
    while not sequence.finish_reason:
        plan = sim.send()
        ends = sim.scheduler.in_flight[-1].chunk_ends if plan else []
        if ends and ends[0] > (300, 0, 300)[num_deaths]:
            sim.restart(keeps_memory=keeps_memory)
            num_deaths += 1
        elif sim.has_result:
            sim.receive()
    assert sim.cut == {sequence}
    assert num_deaths == 3
    sim.run()


def test_deaths_before_a_token_or_elsewhere_say_nothing_of_positions() -> None:
    sequence, elsewhere = make_sequence(long_prompt(9)), make_sequence(long_prompt(9))
    sequence.num_planned_tokens = 9
    count_death([sequence])
    sequence.num_deaths = 0  # it got a token, and was preempted
    sequence.num_planned_tokens = 4
    count_death([sequence])
    elsewhere.num_deaths = 1
    for number, expected in (4, 1), (5, 0):
        sequence.confirm_chunk(number)
        elsewhere.confirm_chunk(number)
        assert (sequence.num_deaths, elsewhere.num_deaths) == (expected, 1)
