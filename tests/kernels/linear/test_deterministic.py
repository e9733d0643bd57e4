"""Products with the same bits for every number of rows."""

import itertools

import pytest
import torch

from penstock.kernels.device import Device, simulated
from penstock.kernels.linear import deterministic
from penstock.kernels.linear.deterministic import (
    RangedTile,
    config_of,
    launch_ranged,
    num_ranges,
    tile_of,
)
from penstock.kernels.linear.gemm_candidates import SIZES, GemmShape, shapes
from penstock.kernels.linear.gemm_config import GemmConfig
from penstock.kernels.linear.small_m_gemm import Product, launch
from penstock.kernels.quantize.quantize import quantize
from penstock.kernels.quantize.types import BLOCK, Quantized
from tests.kernels.compile_launches import GPUS
from tests.kernels.conftest import on_gpu

pytestmark = pytest.mark.usefixtures("tensor_cores")
ROWS = (1, 3, 17, 64)
MANY = 70
SMALL = GemmConfig("mma", 16, 32, 1, 4, 3, 0)
TILE = RangedTile(64, 64, 4, 2)


def weight_of(name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | Quantized:
    numbers = torch.randn(rows, columns) * torch.exp(torch.randn(rows, columns)) / columns**0.5
    if name == "rows":
        return quantize(numbers.to(dtype))
    if name == "blocks":
        blocks = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.5
        return Quantized(quantize(numbers).values, blocks, dtype)
    return numbers.to(dtype)


@pytest.mark.parametrize("split_k", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "weights"),
    [("add", "16 bits"), ("swiglu", "16 bits"), ("logits", "rows"), on_gpu("swiglu", "blocks")],
)
def test_a_row_has_the_same_bits_for_every_number_of_rows(
    device: str, dtype: torch.dtype, kind: str, weights: str, split_k: int
) -> None:
    """In the kernel of few rows with any tile sizes, and in the kernel of many rows."""
    columns, inner = 40, 256
    swiglu = kind == "swiglu"
    weight = weight_of(weights, columns * (2 if swiglu else 1), inner, dtype)
    if isinstance(weight, Quantized):
        weight = Quantized(weight.values.to(device), weight.scale.to(device), dtype)
    else:
        weight = weight.to(device)
    x = (torch.randn(MANY, inner) * torch.exp(torch.randn(MANY, 1))).to(device, dtype)
    residual = torch.randn(MANY, columns).to(device, dtype) if kind == "add" else None
    out = torch.full((MANY, columns), torch.nan, device=device, dtype=dtype)
    if kind == "logits":
        out = out.float()
    whole = Product(x, weight, out, residual=residual, swiglu=swiglu)
    launch_ranged(whole, split_k, TILE)
    assert out.isfinite().all()
    for rows in ROWS:
        some = residual if residual is None else residual[-rows:].contiguous()
        few = whole._replace(
            x=x[-rows:].contiguous(), out=torch.empty_like(out[:rows]), residual=some
        )
        for changes in ({"bk": 64}, {"bn": 32, "bk": 16}, {"bn": 64, "bk": 256 // split_k}):
            launch(few, SMALL._replace(split_k=split_k, **changes))
            assert torch.equal(few.out, out[-rows:]), (rows, changes)
        launch_ranged(few, split_k, TILE)
        assert torch.equal(few.out, out[-rows:]), rows


def test_the_order_of_the_ranges_shows_in_the_bits(device: str, dtype: torch.dtype) -> None:
    """Otherwise the test before could not fail."""
    x, weight = torch.randn(2, 64, 256).to(device, dtype)
    outs = [torch.empty(64, 64, device=device) for _ in range(2)]
    for split_k, out in zip((1, 4), outs, strict=True):
        launch_ranged(Product(x, weight, out), split_k, TILE)
    assert not torch.equal(*outs)
    assert torch.allclose(*outs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", [simulated(text) for text in GPUS.values()], ids=GPUS)
def test_the_ranges_depend_on_the_weight_only(device: Device) -> None:
    others = GemmShape("logits", 128, 2048), GemmShape("add", 48, 80), GemmShape("add", 64, 96)
    for shape in (*itertools.chain.from_iterable(map(shapes, SIZES)), *others):
        ranges = num_ranges(shape)
        for rows, weight_bytes in itertools.product((1, 16, 17, 32, 33, 64), (1, 2)):
            config = config_of(shape, rows, weight_bytes, device)
            assert config.split_k == ranges
            assert ranges == 1 or shape.inner % (config.bk * ranges) == 0
            assert ranges == 1 or shape.inner % (deterministic.BK * ranges) == 0
        for rows, weights in itertools.product((65, 500, 8192), (1, 2)):
            tile_of(rows, shape.num_columns, ranges > 1, weights, device)
    assert [num_ranges(one) for one in shapes("0.6B")] == [1, 4, 1, 4, 1]
