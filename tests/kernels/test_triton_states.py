"""The state blocks of a step's rows, as torch finds them on a CPU."""

import random

import pytest
import torch

from penstock.kernels import triton_states
from penstock.kernels.layouts.states import _BITS, States, pack_states
from tests.kernels.conftest import on_gpu


@pytest.mark.parametrize("num_rows", [1, 5, 130, on_gpu(1000)])
def test_rows_of_one_sequence_have_its_bounds(num_rows: int, device: str) -> None:
    """A block is read and written by several rows, by one, or only read; other rows are padding."""
    draw = random.Random(num_rows)
    num_blocks = num_rows + 4
    positions = torch.randint(1, 50, (num_blocks + 1, 2)).int()
    blocks = list(range(num_blocks))
    draw.shuffle(blocks)
    half = num_blocks // 2
    pairs = [*zip(blocks[:half], blocks[half:], strict=False), (-1, blocks[-1]), (-1, -1)]
    rows = [draw.choice(pairs) for _ in range(num_rows)]
    packed = torch.tensor([pack_states(*row) for row in rows]).int()
    starts, counts = (torch.randint(*some, (num_rows,)).int() for some in ((-1, 90), (1, 9)))
    ends, prompt_ends = starts + counts, starts - 3
    bounds = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    marked = positions.clone()
    step = States(marked, []).begin(packed, bounds, ends, prompt_ends)
    arguments = [tensor.to(device) for tensor in (packed, bounds, ends, prompt_ends, positions)]
    found = triton_states.begin(arguments[0], _BITS, *arguments[1:])
    assert torch.equal(found.cpu(), torch.stack(step[1:]))
    assert not any(row.data_ptr() % 16 for row in found), "kernels are not compiled again for them"
    assert torch.equal(arguments[-1].cpu(), marked)
    decode_lens = (step.written % 3).int()  # the same for all rows of a block
    States(marked, []).end(step, decode_lens)
    triton_states.end(found[1], *found[2:4], decode_lens.to(device), arguments[-1])
    assert torch.equal(arguments[-1].cpu()[:-1], marked[:-1]), "padded rows may differ"
