"""Experts of packed integers in Triton, against what the integers stand for."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.packed.matrices import Packed
from penstock.kernels.packed.triton_packed import pairs_of_tile
from penstock.kernels.triton_moe import experts
from tests.kernels.conftest import on_gpu
from tests.kernels.linear.test_packed_gemm import on, pack
from tests.kernels.moe.test_triton_moe import expected

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
"""the interpreter's, where a padded token has no probabilities"""


def stacked(weights: list[Packed]) -> Packed:
    """Return one weight of all experts."""
    first = weights[0]
    each = zip(*((w.words, w.groups, w.order) for w in weights), strict=True)
    parts = [None if one[0] is None else torch.stack(one) for one in each]  # type: ignore[arg-type]
    return Packed(*parts, first.num_columns, first.group_size)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "hidden", "size", "bits", "group", "zeros", "order", "is_mixed"),
    [
        (1, 160, 96, 4, 32, True, False, False),
        (20, 128, 96, 4, 0, False, True, False),
        (3, 128, 64, 8, 64, True, True, False),
        *((1, 128, 64, 4, 64, True, False, True), (5, 128, 64, 4, 64, True, False, True)),
        on_gpu(1, 2048, 768, 4, 128, True, False, False),
        on_gpu(64, 2048, 768, 4, 128, False, False, False),
        on_gpu(2048, 2048, 768, 4, 128, True, True, False),
    ],
)
def test_experts_of_integers(
    tokens: int,
    hidden: int,
    size: int,
    bits: int,
    group: int,
    zeros: bool,
    order: bool,
    is_mixed: bool,
    device: str,
) -> None:
    """is_mixed: down is in 16 bits, as one that is cut within groups."""
    choice = {"zeros": zeros, "order": order}
    gate_up = stacked([pack(2 * size, hidden, bits, group, **choice) for _ in range(6)])
    down: Packed | Tensor = stacked([pack(hidden, size, bits, group, **choice) for _ in range(6)])
    assert isinstance(down, Packed)
    stand_for = gate_up.dequantized(), down.dequantized()
    x, logits = torch.randn(tokens, hidden) / hidden**0.5, torch.randn(tokens, 6) * 2
    for dtype in (torch.float16, torch.bfloat16)[: 1 + (device == "cuda")]:
        rows = x.to(dtype)
        wanted = expected(rows.float(), logits, *stand_for, 3, True, 0)
        there = stand_for[1].to(device, dtype) if is_mixed else on(device, down)
        out = experts(rows.to(device), logits.to(device), on(device, gate_up), there, 3, True)
        error = (out.cpu().float() - wanted).norm() / wanted.norm()
        assert error < (3e-3 if dtype == torch.float16 else 1e-2)


def test_tiles_of_pairs() -> None:
    chosen = [pairs_of_tile(pairs, 128) for pairs in (8, 256, 512, 2048, 4096, 1 << 20)]
    assert chosen == [16, 16, 16, 32, 64, 64]
