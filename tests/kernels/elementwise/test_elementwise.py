"""RMSNorm and the activation, against their formulas, and row by row."""

import math

import pytest
import torch

from penstock.kernels.elementwise import rms_norm, silu_and_mul

EPS = 1e-6


def test_rms_norm_has_the_formula_of_the_paper() -> None:
    x, weight = torch.randn(5, 48), torch.rand(48)
    rms = (x.double().square().sum(-1, keepdim=True) / 48 + EPS).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), x.double() / rms * weight)


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(1, 8), torch.ones(8), EPS), torch.zeros(1, 8))


def test_silu_and_mul_has_the_formula_of_the_paper() -> None:
    x = torch.randn(5, 2 * 33) * 20
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_and_mul(x).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gate", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_silu_and_mul_is_finite_at_the_ends(gate: float) -> None:
    result = silu_and_mul(torch.tensor([[gate, 1.0]])).item()
    assert math.isclose(result, max(gate, 0.0), abs_tol=1e-6)


@pytest.mark.parametrize("width", [7, 33, 100, 256])
def test_a_row_does_not_depend_on_the_others(width: int) -> None:
    x, weight = torch.randn(50, 2 * width), torch.rand(2 * width)
    normed, activated = rms_norm(x, weight, EPS), silu_and_mul(x)
    for some in (slice(0, 1), slice(3, 4), slice(9, 30), slice(49, 50)):
        rows = x[some].clone()
        assert torch.equal(rms_norm(rows, weight, EPS), normed[some])
        assert torch.equal(silu_and_mul(rows), activated[some])


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"weight: got shape \[4\], expected \[8\]"):
        rms_norm(torch.zeros(2, 8), torch.ones(4), EPS)
    with pytest.raises(ValueError, match="x: got 5 columns, expected an even number"):
        silu_and_mul(torch.zeros(2, 5))
