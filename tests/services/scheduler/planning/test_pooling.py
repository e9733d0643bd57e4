"""Sequences with `pooling`, which end with their prompt."""

import pytest

from penstock.protocol.messages.plan import RowExtras
from penstock.protocol.messages.sampling import Pooling
from penstock.services.scheduler.in_flight_plan import row_of
from penstock.services.scheduler.sequence import CannotFitError
from tests.services.scheduler.builders import long_prompt, make_sequence
from tests.services.scheduler.desk import Desk
from tests.services.scheduler.reference import pooled_of
from tests.services.scheduler.simulation import Simulation

EMBED = Pooling()


def test_a_prompt_in_chunks_ends_without_a_token_and_frees_its_blocks() -> None:
    sim = Simulation(max_num_batched_tokens=4, max_model_len=64)
    beside = sim.add(long_prompt(3, first=90), max_tokens=9, ignore_eos=True)
    pooled = sim.add(long_prompt(11), pooling=EMBED)
    sim.run()
    assert (pooled.output_token_ids, pooled.finish_reason) == ([], "stop")
    assert pooled.pooled == pooled_of(long_prompt(11))
    assert len(beside.output_token_ids) == 9


def test_a_prompt_may_fill_the_context() -> None:
    sim = Simulation(max_model_len=8, num_blocks=2)
    full = sim.add(long_prompt(8), pooling=EMBED)
    with pytest.raises(CannotFitError, match="got 9 tokens, expected up to 8, which fit"):
        sim.add(long_prompt(9), pooling=EMBED)
    sim.run()
    assert full.pooled == pooled_of(long_prompt(8))


def test_prompts_share_the_prefix_cache_with_text() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1)
    pooled = sim.add(long_prompt(9), pooling=EMBED)
    text = sim.add([*long_prompt(9), 5], max_tokens=1)
    sim.run()
    assert (pooled.num_cached_tokens, text.num_cached_tokens) == (8, 8)


def test_the_result_outlives_preemption_and_workers() -> None:
    sim = Simulation(max_num_batched_tokens=4, num_plans_in_flight=1)
    pooled = sim.add(long_prompt(11), pooling=EMBED)
    sim.step()
    sim.preempt(pooled)
    sim.step()
    sim.restart()
    for _ in range(3):
        sim.step()
    assert pooled.pooled == pooled_of(long_prompt(11))
    sim.restart()
    sim.run()
    assert pooled.num_preemptions == 2


def test_a_row_of_labels_is_checked_and_sent_as_it_is() -> None:
    labels = Pooling(label_ids=[7, 264])
    sequence = make_sequence((5, 6), pooling=labels)
    assert row_of(sequence).extras == RowExtras(2, end_token_ids=[0], pooling=labels)
    with pytest.raises(CannotFitError, match=r"pooling.label_ids: got token id 264"):
        sequence.check(264)


def test_a_stream_is_opened_with_the_result_by_every_detokenizer_that_gets_it() -> None:
    """Not before there is a result, or the detokenizer would wait for tokens."""
    desk = Desk("a")
    (sequence,) = desk.open(pooling=EMBED)
    desk.streams.reopen(sequence)
    desk.deliver()
    assert not desk.readers[b"a"].opened
    assert sequence.set_pooled(b"1234")
    sequence.finish_reason = "stop"
    desk.end(sequence)
    desk.deliver()
    desk.streams.lost(b"a")
    desk.come("b")
    desk.deliver()
    for reader in desk.readers.values():
        (opened,) = reader.opened
        assert (opened.pooled, opened.finish_reason, opened.output_token_ids) == (
            b"1234",
            "stop",
            b"",
        )
