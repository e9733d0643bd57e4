"""The plan kernels against their reference, on records of random plans."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.kernels.cpu.compiled_step import CompiledStep
from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.step import Slots, StepBuffers, make_slots, make_step_buffers
from penstock.kernels.step import reference
from penstock.services.worker.persistent_batch import PersistentBatch
from tests.services.worker.plans import plan, row

NUM_SLOTS, MAX_BLOCKS, BLOCK_SIZE, MAX_TOKENS = 12, 9, 8, 16384


def poisoned(device: str) -> tuple[Slots, StepBuffers]:
    where = torch.device(device)
    slots = make_slots(NUM_SLOTS, MAX_BLOCKS, where)
    buffers = make_step_buffers(NUM_SLOTS, MAX_BLOCKS, MAX_TOKENS, where)
    for buffer in buffers:
        buffer.fill_(-7)
    return slots, buffers


def on_gpu(record: torch.Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape) -> None:
    from penstock.kernels.step.triton_apply_plan import apply_plan

    apply_plan(record, slots, buffers, shape, BLOCK_SIZE)


def compiled(record: torch.Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape) -> None:
    CompiledStep().apply_plan(record, slots, buffers, shape, BLOCK_SIZE)


def padded(shape: BatchShape, random: np.random.Generator) -> BatchShape:
    """With room for more, or not; tiles of another size."""
    more_rows, more_tokens, more_tiles = random.integers(0, 20, 3).tolist()
    num_rows = min(NUM_SLOTS, shape.num_rows + more_rows % 4)
    if not shape.num_tiles:
        return shape._replace(num_rows=num_rows, num_tokens=num_rows, num_decode=num_rows)
    return shape._replace(
        num_rows=num_rows,
        num_tokens=shape.num_tokens + more_tokens,
        num_decode=num_rows,
        num_tiles=shape.num_tiles * 8 + more_tiles,
        tile_size=8,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.gpu)])
def test_makes_what_the_reference_makes(device: str, seed: int) -> None:
    compare_with_reference(on_gpu, device, seed)


@pytest.mark.parametrize("seed", [3, 4])
def test_compiled_code_makes_what_the_reference_makes(seed: int) -> None:
    compare_with_reference(compiled, "cpu", seed)


def compare_with_reference(apply: Callable[..., None], device: str, seed: int) -> None:
    """Rows come with chunks, decode, get blocks, are drafted and leave; some steps are padded."""
    random = np.random.default_rng(seed)
    batch = PersistentBatch(NUM_SLOTS, MAX_BLOCKS, BLOCK_SIZE, 500, 1000)
    slots, buffers = poisoned("cpu")
    gpu_slots, gpu_buffers = poisoned(device)
    lengths: dict[int, int] = {}
    for _ in range(8):
        removed = [slot for slot in lengths if random.random() < 0.2]
        appended = [(s, int(random.integers(500))) for s in lengths if lengths[s] % BLOCK_SIZE == 0]
        appended = [pair for pair in appended if pair[0] not in removed]
        for slot in lengths:
            lengths[slot] += 1
        for slot in removed:
            del lengths[slot]
        added, chunks = [], []
        for slot in set(range(NUM_SLOTS)) - set(lengths) - set(removed):
            if random.random() < 0.3:
                length = int(random.integers(1, 40))
                blocks = random.integers(500, size=-(-length // BLOCK_SIZE)).tolist()
                ids = random.integers(1000, size=length).tolist()
                params = {"temperature": random.random(), "top_k": 5, "top_p": 0.5, "min_p": 0.1}
                seed_of_row = int(random.integers(-(2**63), 2**63 - 1))
                added.append(row(slot, ids, blocks, **params, seed=seed_of_row))  # type: ignore[arg-type]
                chunks.append((slot, length))
                lengths[slot] = length
        behind = [slot for slot in lengths if slot not in dict(chunks)][:3]
        drafts = [(slot, lengths[slot] - 1, [int(random.integers(1000))]) for slot in behind]
        step_plan = plan(
            removed=removed, added=added, appended=appended, chunks=chunks, drafts=drafts
        )
        batch.apply(step_plan)
        rows = batch.advance(step_plan.chunks, step_plan.drafts)
        if rows is None:
            continue
        shape = padded(rows.shape, random)
        record = torch.from_numpy(rows.record)
        reference.apply_changes(record, slots)
        reference.make_rows(record, slots, buffers, shape, BLOCK_SIZE)
        apply(record.to(device), gpu_slots, gpu_buffers, shape)
        tokens = torch.randint(1000, (NUM_SLOTS + 1,))
        slots.last_token.copy_(tokens)
        for ours, expected in zip(gpu_slots[2:], slots[2:], strict=True):
            assert torch.equal(ours.cpu(), expected)
        assert torch.equal(gpu_slots.block_tables.cpu(), slots.block_tables)
        for index, length in enumerate(buffers.context_lens[: shape.num_rows].tolist()):
            used = -(-length // BLOCK_SIZE)
            table = gpu_buffers.block_tables[index, :used].cpu()
            assert torch.equal(table, buffers.block_tables[index, :used])
            buffers.block_tables[index] = gpu_buffers.block_tables[index].cpu()
        for ours, expected in zip(gpu_buffers, buffers, strict=True):
            assert torch.equal(ours.cpu(), expected)
        gpu_slots.last_token.copy_(tokens)


def test_a_record_without_rows_is_all_padding(device: str) -> None:
    slots, buffers = poisoned(device)
    shape = BatchShape(4, 4, 4, 0, 64, 1, 1)
    on_gpu(torch.zeros(8, dtype=torch.int32, device=device), slots, buffers, shape)
    assert buffers.slots[:4].tolist() == [-1] * 4
    assert buffers.slot_mapping[:4].tolist() == [-1] * 4
    assert buffers.context_lens[:5].tolist() == [0, 0, 0, 0, -7]
    assert buffers.cu_seqlens_q[:5].tolist() == [0, 1, 2, 3, 4]
