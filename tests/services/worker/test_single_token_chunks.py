"""Chunks of one token, which are rows that decode."""

from pathlib import Path

import numpy as np
import pytest

from penstock.kernels.layouts import step as layout
from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.states import pack_states
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import RowExtras
from penstock.services.worker.persistent_batch import PersistentBatch
from tests.services.worker.device_batch import Batch, run
from tests.services.worker.driver import Driver, make_runner
from tests.services.worker.plans import plan, row


def test_a_chunk_of_one_token_is_a_row_that_decodes() -> None:
    batch = Batch()
    run(batch, plan(added=[row(2, [20, 21], [2])], chunks=[(2, 2)]))
    batch.last_token[2] = 22
    added = [
        row(3, range(30, 34), [3]),
        row(1, range(10, 15), [1, 9], num_computed_tokens=4),
        row(0, range(3), [0]),
    ]
    step, sampled = run(batch, plan(added=added, chunks=[(3, 1), (1, 1), (0, 3)]))
    assert step.input_ids.tolist() == [14, 22, 30, 0, 1, 2]
    assert step.positions.tolist() == [4, 2, 0, 0, 1, 2]
    assert step.shape == BatchShape(4, 6, 3, 1, 64, max_seqlen_q=3, max_seqlen_k=5)
    assert step.decode_lens.tolist() == [5, 3, 1]
    assert (sampled.slots, sampled.last_tokens) == ([0, 1, 2], [5, 0, 1])
    step, sampled = run(batch, plan(chunks=[(3, 3)]))
    assert step.input_ids[-3:].tolist() == [31, 32, 33]
    assert sampled.slots == [0, 1, 2, 3]


def test_computed_tokens_may_be_skipped() -> None:
    for num_skipped in range(4):
        batch = Batch()
        added = row(1, range(10 + num_skipped, 16), [1, 9], num_computed_tokens=3)
        added.num_skipped = num_skipped
        step, sampled = run(batch, plan(added=[added], chunks=[(1, 2)]))
        assert (step.input_ids.tolist(), step.positions.tolist()) == ([13, 14], [3, 4])
        assert sampled.slots == []
        step, sampled = run(batch, plan(chunks=[(1, 1)]))
        assert (step.input_ids.tolist(), step.positions.tolist()) == ([15], [5])
        assert sampled.slots == [1]


@pytest.mark.parametrize("num_skipped", [-1, 4, 1 << 40])
def test_other_tokens_may_not(num_skipped: int) -> None:
    added = row(1, range(10, 16), [1, 9], num_computed_tokens=3)
    added.num_skipped = num_skipped
    with pytest.raises(ValueError, match=f"slot 1: got 3 computed of .* {num_skipped} skipped"):
        Batch().apply(plan(added=[added]))


def test_extras_need_all_tokens() -> None:
    added = row(1, range(10, 16), [1, 9], num_computed_tokens=3, extras=RowExtras(4))
    Batch().apply(plan(added=[added]))
    added.num_skipped = 1
    with pytest.raises(ValueError, match="slot 1: got 3 computed of 7 tokens, 1 skipped"):
        Batch().apply(plan(added=[added]))


def test_only_a_row_with_a_sampled_token_follows_the_last_step() -> None:
    batch = Batch()
    batch.apply(plan(added=[row(2, [20], [2])]))
    rows = batch.advance(pack([2, 1]))
    assert rows and rows.shape.num_decode and not rows.follows_last_step
    rows = batch.advance(b"")
    assert rows and rows.follows_last_step


def test_a_chunk_that_ends_no_prompt_has_no_token(folder: Path) -> None:
    """Also on a CPU, whose compiled step computes a token for each row."""
    whole, cut = (Driver(make_runner(folder)) for _ in range(2))
    added = [row(0, range(5), [0]), row(2, range(10, 13), [1])]
    for driver in whole, cut:
        driver.step(plan(added=added, chunks=[(0, 5)]), 0)
    whole.step(plan(chunks=[(2, 3)]), 0, 2)
    cut.step(plan(chunks=[(2, 1)]), 0)
    cut.step(plan(chunks=[(2, 1)]), 0)
    cut.step(plan(chunks=[(2, 1)]), 0, 2)
    cut.decode(2, 0, 2)
    whole.decode(4, 0, 2)
    assert cut.tokens == {0: whole.tokens[0], 2: whole.tokens[2][:3]}


def test_with_recurrent_state_only_a_sampled_token_is_a_row_that_decodes() -> None:
    """As after a recovery; a prompt's last token has the arithmetic of the prompt."""
    batch = PersistentBatch(8, 4, block_size=4, num_blocks=20, vocab_size=100, num_state_blocks=8)
    added = [row(slot, range(7), [2 * slot, 2 * slot + 1], 6) for slot in range(3)]
    for one, number in zip(added, (7, 6, 7), strict=True):
        one.num_prompt_tokens = number
    start = plan(added=added)
    start.states = pack([0, 0, 1, 1, 2, 3, 2, 4, 5])
    batch.apply(start)
    rows = batch.advance(pack([0, 1, 1, 1, 2, 1]))
    assert rows and (rows.shape.num_decode, rows.shape.num_tiles) == (1, 2)
    assert rows.table[:, layout.SLOT].tolist() == [1, 0, 2]
    assert rows.inputs(np.arange(1)).tolist() == [6]
    assert rows.table[0, layout.STATES] == pack_states(np.array([2]), np.array([3]))[0]
