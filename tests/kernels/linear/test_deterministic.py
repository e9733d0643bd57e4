"""Products with the same bits for every number of rows."""

import itertools

import pytest
import torch

from penstock.kernels.deterministic import triton_linear as deterministic
from penstock.kernels.deterministic.triton_linear import (
    RangedTile,
    config_of,
    launch_ranged,
    multiply,
    num_ranges,
    one_loop_tile,
    tile_of,
)
from penstock.kernels.device import Device, simulated, this_device
from penstock.kernels.elementwise import quantize
from penstock.kernels.linear.linear import linear_add, norm_linear, norm_swiglu
from penstock.kernels.linear.small_m_gemm import Product, launch
from penstock.kernels.linear.tile_sizes import SIZES, GemmConfig, GemmShape, shapes
from penstock.kernels.matrices import BLOCK, Quantized
from tests.kernels.compile_launches import GPUS
from tests.kernels.conftest import there
from tests.search import diagonal

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


WEIGHTS = ("add", "16 bits"), ("swiglu", "16 bits"), ("logits", "rows"), ("swiglu", "blocks")


@pytest.mark.parametrize(("split_k", "case"), diagonal([1, 2, 4], WEIGHTS))
def test_a_row_has_the_same_bits_for_every_number_of_rows(
    device: str, dtype: torch.dtype, case: tuple[str, str], split_k: int
) -> None:
    """In the kernel of few rows with any tile sizes, and in the kernel of many rows."""
    (kind, weights), columns, inner = case, 40, 256
    if weights != "16 bits" and device == "cuda" and this_device().is_asynchronous:
        pytest.skip("few and many rows of 8-bit weights are added in another order: refused there")
    swiglu = kind == "swiglu"
    weight = there(device, weight_of(weights, columns * (2 if swiglu else 1), inner, dtype))
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


@pytest.mark.parametrize(("kind", "inner"), diagonal(["add", "norm", "swiglu"], [512, 1536]))
def test_small_weights_have_a_warp_for_each_range(
    device: str, dtype: torch.dtype, kind: str, inner: int
) -> None:
    """A row has the same bits in all kernels: alone, with up to 16 others, with many."""
    columns, eps = 40, 1e-6
    num_weights = columns * (2 if kind == "swiglu" else 1)
    shape = GemmShape(kind, num_weights, inner)
    assert num_ranges(shape) == 4
    weight = (torch.randn(num_weights, inner) / inner**0.5).to(device, dtype)
    x = (torch.randn(MANY, inner) * torch.exp(torch.randn(MANY, 1))).to(device, dtype)
    residual = norm_weight = None
    if kind == "add":
        residual = torch.randn(MANY, columns).to(device, dtype)
    else:
        norm_weight = (torch.rand(inner) + 0.5).to(device, dtype)
    whole = multiply(kind, x, weight, norm_weight, eps, residual)
    for rows in (1, 3, 16, 17, 64):
        some = residual if residual is None else residual[-rows:].contiguous()
        few = multiply(kind, x[-rows:].contiguous(), weight, norm_weight, eps, some)
        assert torch.equal(few, whole[-rows:]), rows
    x, weight = x.cpu().float(), weight.cpu().float()
    if residual is not None:
        expected = linear_add(x, weight, residual.cpu().float())
    else:
        assert norm_weight is not None
        function = norm_swiglu if kind == "swiglu" else norm_linear
        expected = function(x, norm_weight.cpu().float(), eps, weight)  # type: ignore[assignment]
    torch.testing.assert_close(whole.cpu().float(), expected, rtol=0.02, atol=0.02)


def test_tile_sizes_change_no_bit(device: str, dtype: torch.dtype) -> None:
    """In the kernel of few rows, and in both loops of the kernel of many rows."""
    x, weight = torch.randn(16, 512).to(device, dtype), torch.randn(40, 512).to(device, dtype)
    product = Product(x, weight, torch.full((16, 40), torch.nan, device=device, dtype=dtype))
    launch(product, GemmConfig("ranges", 8, 512, 1, 4, 2, 0))
    expected = product.out.clone()
    launch(
        product._replace(out=product.out.fill_(torch.nan)),
        GemmConfig("ranges", 32, 128, 1, 4, 3, 64),
    )
    assert torch.equal(product.out, expected)
    for tile in (TILE, RangedTile(16, 32, 4, 2, 128, one_loop=True)):
        launch_ranged(product._replace(out=product.out.fill_(torch.nan)), 4, tile)
        assert torch.equal(product.out, expected)
    with pytest.raises(ValueError, match="expected two loops"):
        launch_ranged(product, 4, tile._replace(bk=256))


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
            if config.kernel == "ranges":
                assert config.num_warps == ranges == 4
                assert shape.inner % config.bk == 0
            else:
                assert config.split_k == ranges
                assert ranges == 1 or shape.inner % (config.bk * ranges) == 0
            assert ranges == 1 or shape.inner % (deterministic.BK * ranges) == 0
        for rows, weights in itertools.product((17, 40, 64), (1, 2)):
            one_loop_tile(rows, weights, device)
        for rows, weights in itertools.product((65, 500, 8192), (1, 2)):
            tile_of(rows, shape.num_columns, ranges > 1, weights, device)
    assert [num_ranges(one) for one in shapes("0.6B")] == [4, 4, 4, 4, 1]
    assert [num_ranges(one) for one in shapes("8B")] == [1, 1, 1, 1, 1]
