"""Rows after plans, and the tensors of the steps that follow."""

import numpy as np
import pytest
import torch

from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.sampling import COLUMNS, column
from penstock.kernels.step.apply_plan import apply_plan
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.sampling import NUMBERS
from penstock.services.worker.persistent_batch import shape_of
from tests.services.worker.device_batch import Batch, run
from tests.services.worker.plans import plan, row


@pytest.fixture
def batch() -> Batch:
    """8 slots for rows of at most 4 blocks of 4 tokens, out of 20 blocks."""
    return Batch()


def test_prefill_takes_the_given_tokens(batch: Batch) -> None:
    step, sampled = run(batch, plan(added=[row(2, range(10, 16), [7, 3])], chunks=[(2, 6)]))
    assert step.input_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert step.slot_mapping.tolist() == [28, 29, 30, 31, 12, 13]
    assert step.cu_seqlens_q.tolist() == [0, 6]
    assert step.shape.max_seqlen_q == 6
    assert step.context_lens.tolist() == [6]
    assert step.block_tables[:, :2].tolist() == [[7, 3]]
    assert sampled.slots == [2]
    assert sampled.last_tokens == [5]
    assert sampled.positions == [6]


def test_a_chunk_samples_only_when_it_is_the_last(batch: Batch) -> None:
    _, first = run(batch, plan(added=[row(0, range(6), [0, 1])], chunks=[(0, 5)]))
    assert first.slots == []
    step, second = run(batch, plan(chunks=[(0, 1)]))
    assert step.input_ids.tolist() == [5]
    assert step.positions.tolist() == [5]
    assert step.context_lens.tolist() == [6]
    assert second.slots == [0]


def test_decode_takes_the_token_sampled_last(batch: Batch) -> None:
    run(batch, plan(added=[row(3, range(5), [9, 4])], chunks=[(3, 5)]))
    batch.last_token[3] = 77
    step, sampled = run(batch, plan())
    assert step.input_ids.tolist() == [77]
    assert step.positions.tolist() == [5]
    assert step.slot_mapping.tolist() == [4 * 4 + 1]
    assert step.context_lens.tolist() == [6]
    assert sampled.positions == [6]


def test_rows_that_decode_come_first_each_kind_in_ascending_order_of_slot(batch: Batch) -> None:
    added = [row(5, [50], [5]), row(1, [10], [1])]
    run(batch, plan(added=added, chunks=[(5, 1), (1, 1)]))
    batch.last_token[1], batch.last_token[5] = 11, 51
    added = [row(4, range(40, 43), [4]), row(0, range(3), [0]), row(7, [70, 71], [7])]
    step, sampled = run(batch, plan(added=added, chunks=[(4, 3), (0, 2)]))
    assert step.input_ids.tolist() == [11, 51, 0, 1, 40, 41, 42]
    assert step.positions.tolist() == [1, 1, 0, 1, 0, 1, 2]
    assert step.cu_seqlens_q.tolist() == [0, 1, 2, 4, 7]
    assert step.cu_seqlens_k.tolist() == [0, 2, 4, 6, 9]
    assert step.block_tables[:, :1].tolist() == [[1], [5], [0], [4]]
    assert step.shape == BatchShape(4, 7, 2, 2, 64, max_seqlen_q=3, max_seqlen_k=3)
    assert step.decode_lens.tolist() == [2, 2]
    assert step.tiles.tolist() == [[2, 0], [3, 0]]
    assert sampled.slots == [1, 4, 5]
    assert sampled.last_tokens == [0, 6, 1]


def test_a_draft_is_a_row_for_each_token_and_rests_until_the_next(batch: Batch) -> None:
    added = [row(slot, [10 * slot], [slot, 8 + slot]) for slot in (1, 3, 5)]
    run(batch, plan(added=added, chunks=[(5, 1), (1, 1), (3, 1)]))
    batch.last_token[:6] = torch.tensor([0, 11, 0, 31, 0, 51])
    added, chunks = [row(0, [90, 91], [0])], [(0, 2)]
    drafts = [(5, 1, [61, 62]), (3, 1, [-1, 32, 33, 34])]
    step, sampled = run(batch, plan(added=added, chunks=chunks, drafts=drafts))
    assert step.input_ids.tolist() == [11, 31, 32, 33, 34, 61, 62, 90, 91]
    assert step.positions.tolist() == [1, 1, 2, 3, 4, 1, 2, 0, 1]
    assert step.slot_mapping.tolist() == [5, 13, 14, 15, 44, 21, 22, 0, 1]
    assert step.decode_lens.tolist() == step.context_lens.tolist()[:7] == [2, 2, 3, 4, 5, 2, 3]
    assert step.cu_seqlens_q.tolist() == [*range(8), 9]
    assert step.block_tables[:, 0].tolist() == [1, 3, 3, 3, 3, 5, 5, 0]
    assert (step.shape.num_decode, step.shape.num_tiles, step.tiles.tolist()) == (7, 1, [[7, 0]])
    assert sampled.slots == [0, 1, 3, 3, 3, 3, 5, 5]
    assert sampled.positions == [2, 2, 2, 3, 4, 5, 2, 3]
    batch.last_token[:2] = torch.tensor([92, 12])
    step, _ = run(batch, plan())
    assert step.input_ids.tolist() == [92, 12]  # the others rest
    step, _ = run(batch, plan(removed=[0, 1], drafts=[(3, 3, [35]), (5, 3, [63, 64])]))
    assert step.input_ids.tolist() == [35, 63, 64]
    assert step.positions.tolist() == [3, 3, 4]
    batch.last_token[3] = 36
    step, sampled = run(batch, plan())
    assert (step.input_ids.tolist(), step.positions.tolist()) == ([36], [4])
    batch.apply(plan(removed=[3, 5], added=[row(5, [9], [7])]))
    run(batch, plan(chunks=[(5, 1)]))
    assert run(batch, plan())[1].slots == [5]


def test_refuses_a_draft_that_can_not_be(batch: Batch) -> None:
    batch.apply(plan(added=[row(0, range(3), [0, 1]), row(1, [1, 2], [2])]))
    batch.advance(pack([0, 3]))
    batch.advance(b"", pack([0, 3, 2, 7, 8]))
    for message, drafts in {
        "draft: got slot 1 twice, or without a row that decodes": [1, 0, 1, 5],
        "draft: got slot 8 twice": [8, 0, 1, 5],
        "draft: got slot 0 twice": [0, 3, 1, 5, 0, 3, 1, 5],
        "draft of slot 0: got 6, expected 3 to 5": [0, 6, 1, 5],
        "draft of slot 0: got 2, expected 3 to 5": [0, 2, 1, 5],
        "drafted token of slot 0: got -1, expected 0 to 99": [0, 4, 1, -1],
        "drafted token of slot 0: got 100": [0, 5, 2, 1, 100],
        "blocks of slot 0: got 8 tokens, expected 9": [0, 5, 4, 1, 2, 3, 4],
        "rows: got 9, expected at most 8": [0, 3, 9, *range(9)],
        "draft: got 3 tokens, expected 1 to 2": [0, 3, 3, 1, 2],
        "draft: got -1 tokens": [0, 3, -1],
        "draft: got 0 tokens": [0, 3],
    }.items():
        with pytest.raises(ValueError, match=message):
            batch.advance(b"", pack(drafts))


def test_prefill_begins_behind_the_cached_tokens(batch: Batch) -> None:
    step, _ = run(batch, plan(added=[row(0, range(10, 16), [8, 2], 4)], chunks=[(0, 2)]))
    assert step.input_ids.tolist() == [14, 15]
    assert step.positions.tolist() == [4, 5]
    assert step.slot_mapping.tolist() == [8, 9]
    assert step.context_lens.tolist() == [6]


def test_appended_blocks_follow_those_of_the_row(batch: Batch) -> None:
    added = [row(0, range(4), [3]), row(1, range(7), [5, 6])]
    run(batch, plan(added=added, chunks=[(0, 4), (1, 7)]))
    step, _ = run(batch, plan(appended=[(1, 11), (0, 12), (1, 13)]))
    assert batch.slots.block_tables[:2].tolist() == [[3, 12, 0, 0], [5, 6, 11, 13]]
    assert step.slot_mapping.tolist() == [12 * 4, 6 * 4 + 3]


def test_a_slot_is_left_and_taken_in_one_plan(batch: Batch) -> None:
    run(batch, plan(added=[row(0, range(6), [0, 1]), row(1, [9], [2])], chunks=[(0, 4), (1, 1)]))
    added = [row(0, [60, 61], [4])]
    step, sampled = run(batch, plan(removed=[0, 1], added=added, chunks=[(0, 2)]))
    assert step.input_ids.tolist() == [60, 61]
    assert step.positions.tolist() == [0, 1]
    assert step.block_tables[:, :1].tolist() == [[4]]
    assert sampled.slots == [0]


def test_sampling_parameters_are_those_of_the_row(batch: Batch) -> None:
    added = row(6, [1], [0], temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=-(2**63))
    run(batch, plan(added=[added], chunks=[(6, 1)]))
    numbers = {name: column(batch.slots.parameters, name)[6].item() for name in COLUMNS}
    neutral = {name: kind.neutral for name, kind in COLUMNS.items()}
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seed": -(2**63)}
    assert numbers == neutral | given


def test_the_slot_table_has_the_neutral_values_of_the_parameters() -> None:
    assert {name: COLUMNS[name].neutral for name in NUMBERS} == NUMBERS


def test_without_rows_there_is_no_step(batch: Batch) -> None:
    assert batch.step(b"") is None
    run(batch, plan(added=[row(0, [1, 2], [0])], chunks=[(0, 1)]))
    assert batch.step(b"") is None  # its prompt waits for a chunk
    batch.clear()
    assert batch.step(b"") is None
    batch.apply(plan(added=[row(0, [1], [0])]))  # the slot is free again


def test_refuses_a_plan_that_can_not_be(batch: Batch) -> None:
    batch.apply(plan(added=[row(0, range(4), [0])]))
    for message, wrong in {
        "slot: got 0, expected a free slot below 8": plan(added=[row(0, [1], [1])]),
        "slot: got 8, expected a free slot below 8": plan(added=[row(8, [1], [1])]),
        "slot 1: got 2 computed of 2 tokens, 0 skipped": plan(added=[row(1, [1, 2], [1], 2)]),
        "slot 1: got 0 computed of 5 tokens, 0 skipped, "
        "expected fewer, and room in 1 blocks of 4": plan(added=[row(1, range(5), [1])]),
        "sampling: got heat, expected seed, temperature": plan(added=[row(1, [1], [1], heat=1)]),
        "token id of slot 2: got 100, expected 0 to 99": plan(added=[row(2, [100], [1])]),
        "token id of slot 3: got -1": plan(added=[row(3, [-1], [1])]),
        "block id: got 20, expected 0 to 19": plan(appended=[(0, 20)]),
        "slot: got 5, expected a slot with a row": plan(appended=[(5, 1)]),
        "slot: got 4, expected a slot with a row": plan(removed=[4]),
        "block of a row: got 4, expected 0 to 3": plan(appended=[(0, b) for b in range(4)]),
    }.items():
        with pytest.raises(ValueError, match=message):
            batch.apply(wrong)


def test_refuses_a_step_that_can_not_be(batch: Batch) -> None:
    batch.apply(plan(added=[row(0, range(4), [0])]))
    with pytest.raises(ValueError, match="chunk of slot 0: got 5 tokens, expected 1 to 4"):
        batch.advance(pack([0, 5]))
    with pytest.raises(ValueError, match="chunk of slot 0: got 0 tokens, expected 1 to 4"):
        batch.advance(pack([0, 0]))
    with pytest.raises(ValueError, match="slot: got 5, expected a slot with a row"):
        batch.advance(pack([5, 1]))
    batch.advance(pack([0, 4]))
    with pytest.raises(ValueError, match="blocks of slot 0: got 4 tokens, expected 5"):
        batch.advance(b"")


def test_a_row_that_left_before_it_ran_leaves_nothing(batch: Batch) -> None:
    batch.apply(plan(added=[row(0, [1, 2], [9], temperature=0.5)]))
    added = row(0, [3], [5], temperature=0.25)
    step, _ = run(batch, plan(removed=[0], added=[added], chunks=[(0, 1)]))
    assert step.block_tables[0, 0] == 5
    assert column(batch.slots.parameters, "temperature")[0] == 0.25


def test_padded_rows_touch_nothing(batch: Batch) -> None:
    run(batch, plan(added=[row(3, range(5), [9, 4])], chunks=[(3, 5)]))
    record = torch.from_numpy(batch.advance(b"").record)  # type: ignore[union-attr]
    shape = BatchShape(4, 4, 4, 0, 64, 1, 16)
    apply_plan(record, batch.slots, batch.buffers, shape, block_size=4)
    step = batch.buffers.forward_batch(shape)
    assert step.context_lens.tolist() == [6, 0, 0, 0]
    assert step.slot_mapping.tolist() == [17, -1, -1, -1]
    assert step.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert step.cu_seqlens_k.tolist() == [0, 6, 6, 6, 6]
    assert batch.buffers.slots[:4].tolist() == [3, -1, -1, -1]


@pytest.mark.parametrize(
    ("num_decode", "chunks", "size"),
    [
        (8, [], 64),
        (5, [127], 64),
        (5, [128], 128),
        (5, [127, 128], 64),
        (5, [200, 56], 128),
        (312, [100, 100], 64),
        (313, [100, 100], 128),
    ],
)
def test_chunks_should_fill_their_tiles(num_decode: int, chunks: list[int], size: int) -> None:
    """Steps of more than 512 tokens have large tiles in any case."""
    shape = shape_of(np.array([1] * num_decode + chunks), num_decode, 1000)
    assert (shape.num_rows, shape.num_tokens) == (
        num_decode + len(chunks),
        num_decode + sum(chunks),
    )
    assert (shape.tile_size, shape.num_tiles) == (size, sum(-(-chunk // size) for chunk in chunks))


def test_padded_tokens_and_tiles_touch_nothing(batch: Batch) -> None:
    run(batch, plan(added=[row(3, range(5), [9, 4])], chunks=[(3, 5)]))
    added = [row(0, range(7), [1, 2]), row(5, range(4), [3])]
    batch.apply(plan(added=added))
    rows = batch.advance(pack([0, 7, 5, 4]))
    assert rows is not None
    shape = BatchShape(5, 16, 5, 7, 2, 16, 16)
    apply_plan(torch.from_numpy(rows.record), batch.slots, batch.buffers, shape, block_size=4)
    step = batch.buffers.forward_batch(shape)
    assert step.decode_lens.tolist() == [6, 0, 0, 0, 0]
    assert step.tiles.tolist() == [[1, 6], [1, 4], [1, 2], [1, 0], [2, 2], [2, 0], [-1, -1]]
    assert step.cu_seqlens_q.tolist() == [0, 1, 8, 12, 13, 14]
    assert step.input_ids[12:].tolist() == step.positions[12:].tolist() == [0] * 4
    assert step.slot_mapping[12:].tolist() == [-1] * 4
    assert batch.buffers.last_tokens[:5].tolist() == [0, 7, 11, 12, 13]


def test_padded_rows_may_find_no_token_left(batch: Batch) -> None:
    batch.apply(plan(added=[row(3, range(5), [9, 4])]))
    rows = batch.advance(pack([3, 5]))
    assert rows is not None
    shape = BatchShape(4, 6, 4, 3, 2, 6, 16)
    apply_plan(torch.from_numpy(rows.record), batch.slots, batch.buffers, shape, block_size=4)
    assert batch.buffers.cu_seqlens_q[:5].tolist() == [0, 5, 6, 6, 6]
    assert batch.buffers.last_tokens[:4].tolist() == [4, 5, 5, 5]


def test_a_step_that_does_not_fit_is_refused(batch: Batch) -> None:
    record = torch.zeros(8, dtype=torch.int32)
    for shape, message in (
        (BatchShape(9, 9, 9, 0, 64, 1, 1), "rows: got 9, expected 1 to 8"),
        (BatchShape(1, 33, 1, 1, 64, 33, 33), "tokens: got 33, expected 1 to 32"),
        (BatchShape(1, 1, 1, 9, 64, 1, 1), "tiles: got 9, expected 0 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_plan(record, batch.slots, batch.buffers, shape, block_size=4)
