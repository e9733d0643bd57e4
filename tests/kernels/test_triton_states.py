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
    starts = torch.randint(-1, 90, (num_rows,)).int()
    ends, prompt_ends = starts + torch.randint(1, 9, (num_rows,)).int(), starts - 3
    marked = positions.clone()
    _, *expected = States(marked, []).begin(packed, starts, ends, prompt_ends)
    arguments = [tensor.to(device) for tensor in (packed, starts, ends, prompt_ends, positions)]
    found = triton_states.begin(arguments[0], _BITS, *arguments[1:])
    assert torch.equal(found.cpu(), torch.stack(expected))
    assert not any(row.data_ptr() % 16 for row in found), "kernels are not compiled again for them"
    assert torch.equal(arguments[-1].cpu(), marked)
