"""Products with weights of integers, whose activations are rounded to 8 bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import compiler
from penstock.kernels.cpu.compiled_layers import CompiledLayers
from penstock.kernels.linear.linear import norm_linear
from penstock.kernels.packed.matrices import Integers, pack, quantize
from tests.kernels.cpu.layers_case import (
    BLOCK,
    MIXED,
    SHAPE,
    WHOLE_GROUPS,
    Case,
    avx2,
    random_layers,
    reference,
    rounded,
    wide,
)

NUM_COLUMNS = 141
HIDDEN = 640
"""two turns of an unrolled loop, and a rest"""
MAX_ERROR = 0.01
"""of a product by rounding, relative to its result: root of the mean squares"""
MAX_LAYERS_ERROR = 0.02
"""of two layers, relative to what they add"""


def unknown() -> compiler.Target:
    """Return this CPU without instructions for products of bytes."""
    features = [name for name in avx2().features.split(",") if name != "+avx2"]
    return avx2()._replace(features=",".join(features))


def wide_without_vnni() -> compiler.Target:
    """Return this CPU without VNNI; its registers may be too wide for the machine's."""
    features = [name for name in compiler.host().features.split(",") if "vnni" not in name]
    return compiler.host()._replace(features=",".join(features))


TARGETS = [compiler.host, avx2, unknown, wide_without_vnni]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


GROUPS = [(64, False), (128, False), (32, False), (128, True), (64, True), (32, True)]
"""columns with one scale, whether they have a shift, too"""


def matrix_of(bits: int, columns: int, group_size: int = 64, has_shift: bool = False) -> Integers:
    """Return a matrix with a row of zeros, and one with the largest sums."""
    weight = torch.randn(NUM_COLUMNS, columns)
    weight[3] = 0
    weight[4] = weight[4].sign()
    if (group_size, has_shift) == (64, False):
        return quantize(weight, bits)
    most = 1 << (bits - 1)
    codes = torch.randint(-most, most, weight.shape)
    codes[3], codes[4] = 0, most - 1
    scale = torch.rand(NUM_COLUMNS, columns // group_size) / most
    if has_shift:
        scale = torch.stack([scale, torch.randint(1 - most, most, scale.shape) * scale], -1)
        scale[3] = 0
    return Integers(pack(codes, bits), scale)


def product(matrix: Integers, target: compiler.Target, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of x times a matrix, and the matrix."""
    shape = WHOLE_GROUPS._replace(hidden=x.shape[1])
    compiled = CompiledLayers(
        random_layers(shape, torch.bfloat16), shape, BLOCK, target, head=matrix
    )
    return compiled.logits(x, torch.ones(x.shape[1]), 1e-6, matrix), wide(matrix)


COMBINATIONS = [
    pytest.param(
        target, *group, marks=pytest.mark.slow if (at - number) % 4 == 0 else pytest.mark.long
    )
    for number, target in enumerate(TARGETS)
    for at, group in enumerate(GROUPS)
]
"""each target and each kind of group with another one; all of them in `make test-long`

What one test has compiled the others find in the cache.
"""


@pytest.mark.parametrize(("make_target", "group_size", "has_shift"), COMBINATIONS)
@pytest.mark.parametrize("bits", [8, 4])
def test_products_of_activations_of_8_bits_are_exact(
    make_target: Callable[[], compiler.Target], bits: int, group_size: int, has_shift: bool
) -> None:
    codes = torch.randint(-127, 128, (7, HIDDEN)).float()
    codes[:, ::32] = 127  # so each block's scale makes these codes
    codes[0], codes[1, 32:] = 127, 0
    codes[2] = codes[2].sign() * 127
    x = codes * torch.logspace(-2, 1, HIDDEN // 32).repeat_interleave(32)
    matrix = matrix_of(bits, x.shape[1], group_size, has_shift)
    result, weight = product(matrix, make_target(), x)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = normed @ weight.double().T
    torch.testing.assert_close(result.double(), expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(
    ("make_target", "group_size", "has_shift"), COMBINATIONS[: 2 * len(GROUPS)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_activations_are_rounded_to_the_nearest(
    make_target: Callable[[], compiler.Target], bits: int, group_size: int, has_shift: bool
) -> None:
    x = torch.randn(9, HIDDEN)
    matrix = matrix_of(bits, x.shape[1], group_size, has_shift)
    result, weight = product(matrix, make_target(), x)
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(result, rounded(normed) @ weight.T, rtol=1e-5, atol=1e-4)
    exact = normed @ weight.T
    assert 0.001 < rms(result - exact) / rms(exact) < MAX_ERROR


@pytest.mark.parametrize(
    ("make_target", "bits"),
    [
        *((compiler.host, bits) for bits in (8, 4, MIXED)),
        (avx2, MIXED),
        *(pytest.param(avx2, bits, marks=pytest.mark.long) for bits in (8, 4)),
    ],
)
def test_layers_of_integers_are_close_to_the_reference(
    make_target: Callable[[], compiler.Target], bits: int
) -> None:
    case = Case(bits, make_target())
    before, expected = torch.cat(case.inputs), reference(case)
    error = rms(torch.cat(case.outputs) - expected) / rms(expected - before)
    assert error < MAX_LAYERS_ERROR


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_nan_and_infinities_are_not_rounded_to_numbers(bits: int, wrong: float) -> None:
    x = torch.randn(6, HIDDEN)
    x[2, 77] = wrong
    result, _ = product(matrix_of(bits, x.shape[1], 32, has_shift=True), compiler.host(), x)
    assert result[2].isnan().all()
    assert result[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_the_nearest_to_the_weights(bits: int) -> None:
    weight = torch.randn(5, 192) * torch.logspace(-3, 3, 5)[:, None]
    weight[2, :64] = 0
    matrix = quantize(weight, bits)
    assert matrix.shape == weight.shape
    assert matrix.codes.nbytes == weight.numel() * bits // 8
    error = (matrix.dequantized() - weight).abs().view(5, 3, 64)
    # of 4 bits, the end of the range without the largest number is 7, not 8
    assert (error <= matrix.scale.abs()[..., None] * (0.501 if bits == 8 else 1.001)).all()
    assert not matrix.dequantized()[2, :64].any()
    with pytest.raises(ValueError, match="columns: got 100, expected a multiple of 64"):
        quantize(weight[:, :100], bits)


def test_the_head_may_be_of_other_elements_than_the_layers() -> None:
    weight = torch.randn(141, WHOLE_GROUPS.hidden)
    for kind, matrix in ((4, quantize(weight, 8)), (8, weight.bfloat16())):
        case = Case(kind)
        own = CompiledLayers(case.layers, case.shape, BLOCK, head=matrix)
        x, norm = torch.randn(3, case.shape.hidden), torch.rand(case.shape.hidden)
        expected = norm_linear(x, norm, SHAPE.eps, wide(matrix))
        result = own.logits(x, norm, SHAPE.eps, matrix)
        assert rms(result - expected) / rms(expected) < MAX_ERROR
