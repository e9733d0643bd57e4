"""Products on a CPU, by float64; a row has the same bits whatever the other rows are."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.elementwise import quantize, quantize_blocks, rms_norm, silu_and_mul
from penstock.kernels.linear.linear import linear, linear_add, norm_linear, norm_swiglu
from penstock.kernels.matrices import Quantized

SHAPES = [(5, 7), (64, 333), (256, 1024), (768, 256), (1024, 300), (1500, 64)]
NUM_ROWS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 100, 129, 200]
EPS = 1e-6


def normed(x: Tensor, norm_weight: Tensor) -> Tensor:
    """RMSNorm in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_products_are_those_in_float64(inner: int, outer: int) -> None:
    """Alone, added to a residual, and behind a norm, one of whose rows is zero."""
    x, weight, residual = torch.randn(20, inner), torch.randn(outer, inner), torch.randn(20, outer)
    norm_weight, rows = torch.rand(inner), x * 3
    rows[7] = 0
    exact = x.double() @ weight.double().T
    behind_norm = normed(rows, norm_weight) @ weight.double().T
    for found, expected in (
        (linear(x, weight), exact),
        (linear_add(x, weight, residual), residual.double() + exact),
        (norm_linear(rows, norm_weight, EPS, weight), behind_norm),
        (norm_linear(rows, norm_weight, EPS, weight, torch.float32), behind_norm),
    ):
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)


def test_logits_of_bfloat16_are_float32() -> None:
    x, norm_weight = torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    weight = torch.randn(40, 64).bfloat16()
    assert norm_linear(x, norm_weight, EPS, weight).dtype == torch.bfloat16
    assert norm_linear(x, norm_weight, EPS, weight, torch.float32).dtype == torch.float32


@pytest.mark.parametrize(("inner", "outer"), [(5, 8), (64, 332), (1500, 64)])
def test_swiglu_behind_norm_and_product(inner: int, outer: int) -> None:
    x, norm_weight, weight = (
        torch.randn(20, inner) * 3,
        torch.rand(inner),
        torch.randn(outer, inner),
    )
    gate, up = (normed(x, norm_weight) @ weight.double().T).chunk(2, -1)
    out = norm_swiglu(x, norm_weight, EPS, weight / inner**0.5)
    expected = torch.nn.functional.silu(gate / inner**0.5) * up / inner**0.5
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("inner", "outer"), [(64, 332), (1024, 300)])
def test_a_row_does_not_depend_on_the_number_of_rows(inner: int, outer: int) -> None:
    """With what is around the product; `test_batch_invariant.py` has the product alone."""
    x, weight, norm_weight = torch.randn(400, inner), torch.randn(outer, inner), torch.rand(inner)
    residual = torch.randn(400, outer)
    same_rows(lambda some: linear_add(x[some], weight, residual[some]))
    same_rows(lambda some: norm_linear(x[some], norm_weight, EPS, weight, torch.float32))
    same_rows(lambda some: norm_swiglu(x[some], norm_weight, EPS, weight))


@pytest.mark.parametrize("gate", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_the_activation_is_finite_at_the_ends(gate: float) -> None:
    result = silu_and_mul(torch.tensor([[gate, 1.0]])).item()
    assert math.isclose(result, max(gate, 0.0), abs_tol=1e-6)


def same_rows(product: Callable[[slice], Tensor]) -> None:
    """Compute some of 400 rows alone and all together."""
    together = product(slice(0, 400))
    for num_rows in NUM_ROWS:
        for begin in (0, 13, 400 - num_rows):
            some = slice(begin, begin + num_rows)
            assert torch.equal(product(some), together[some]), f"{num_rows} rows"


@pytest.mark.parametrize(("inner", "outer"), [(64, 332), (1024, 300)])
def test_a_quantised_weight_is_what_it_stands_for(inner: int, outer: int) -> None:
    x, weight, norm_weight = torch.randn(20, inner), torch.randn(outer, inner), torch.rand(inner)
    residual, quantized = torch.randn(20, outer), quantize(weight)
    wide = quantized.values.double() * quantized.scale.double()[:, None]
    assert 0.01 < (wide - weight).norm() / weight.norm() < 0.04
    expected = residual.double() + x.double() @ wide.T
    out = linear_add(x, quantized, residual, torch.empty(20, outer))
    torch.testing.assert_close(out.double(), expected, atol=2e-4, rtol=1e-5)
    gate, up = (normed(x, norm_weight) @ wide.T).chunk(2, -1)
    activated = norm_swiglu(x, norm_weight, EPS, quantized)
    assert isinstance(activated, Tensor)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(activated.double(), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize(("inner", "outer"), [(64, 332), (300, 256)])
def test_blocks_have_scales(inner: int, outer: int) -> None:
    x, weight, residual = torch.randn(20, inner), torch.randn(outer, inner), torch.randn(20, outer)
    quantized = quantize_blocks(weight * torch.linspace(0.1, 9, outer)[:, None])
    wide = quantized.dequantized().double()
    assert quantized.scale.shape == (-(-outer // 128), -(-inner // 128))
    out = linear_add(x, quantized, residual)
    expected = residual.double() + x.double() @ wide.T
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=1e-5)
    same = linear(x[3:4], quantized)
    assert torch.equal(same, linear(x, quantized)[3:4])
    first, second = quantized.split([128, outer - 128])
    torch.testing.assert_close(second.dequantized(), wide[128:].float())
    torch.testing.assert_close(first.dequantized(), wide[:128].float())
    wrong = Quantized(quantized.values, quantized.scale[:1])
    with pytest.raises(ValueError, match=r"weight's scale: got shape \[1, \d\]"):
        linear(x, wrong)


def test_refuses_what_does_not_fit() -> None:
    x, norm, weight = torch.zeros(2, 4), torch.zeros(4), torch.zeros(3, 4)
    for sentence, call in {
        r"weight: got shape \[3, 5\], expected \[any, 4\]": lambda: linear(x, torch.zeros(3, 5)),
        r"residual: got shape \[1, 3\]": lambda: linear_add(x, weight, torch.zeros(1, 3)),
        r"norm_weight: got shape \[3\]": lambda: norm_linear(x, norm[:3], EPS, weight),
        r"norm_weight: got shape \[2\]": lambda: norm_swiglu(x, norm[:2], EPS, weight),
        "weight: got 3 rows, expected an even": lambda: norm_swiglu(x, norm, EPS, weight),
        "x: got 5 columns, expected an even": lambda: silu_and_mul(torch.zeros(2, 5)),
        "weight: got shape": lambda: rms_norm(x, norm[:3], EPS),
        "out_dtype: got torch.float16": lambda: norm_linear(x, norm, EPS, weight, torch.float16),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            call()
