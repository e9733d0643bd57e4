"""Matrices in 8 bits: how exact they are, the kernel, and products with them at 8B's sizes."""

import pytest
import torch
from torch import Tensor

from penstock.kernels import triton_elementwise as kernel
from penstock.kernels.device import this_device
from penstock.kernels.elementwise import quantize, rms_norm, silu_and_mul
from penstock.kernels.linear import linear
from penstock.kernels.linear.small_m_gemm import choose
from penstock.kernels.matrices import LARGEST, Matrix, Quantized

EPS = 1e-6
SHAPES_8B = {"norm": (6144, 4096), "add": (4096, 12288), "swiglu": (24576, 4096)}


def dequantized(matrix: Matrix) -> Tensor:
    """In float32."""
    if isinstance(matrix, Tensor):
        return matrix.float()
    return matrix.values.float() * matrix.scale[:, None]


def share_exact(found: Quantized, x: Tensor, most: float = 0.501) -> float:
    """Check that numbers are off by at most `most` steps of e4m3, subnormal ones too."""
    error = (dequantized(found) - x.float()).abs()
    step = torch.maximum(x.float().abs() / 8, found.scale[:, None] * 2**-9)
    return (error <= most * step).float().mean().item()


def test_a_row_is_as_exact_as_8_bits_can_be() -> None:
    x = torch.randn(64, 333) * 10 ** torch.linspace(-8, 8, 64)[:, None]
    x[3] = 0
    found = quantize(x)
    assert share_exact(found, x) == 1
    assert (found.values.float().abs().amax(1)[[0, -1]] == LARGEST).all()
    assert not dequantized(found)[3].any()


@pytest.mark.parametrize("form", ["plain", "norm", "swiglu"])
@pytest.mark.parametrize("size", [48, 333])
def test_the_kernel(form: str, size: int, device: str, dtype: torch.dtype, e4m3: str) -> None:
    swiglu = form == "swiglu"
    x = (torch.randn(3, 2 * size if swiglu else size) * torch.tensor([[1e-3], [1], [20]])).to(dtype)
    x[1] *= 0 if form == "plain" else 1
    norm_weight = (torch.rand(size) + 0.5).to(dtype) if form == "norm" else None
    there = None if norm_weight is None else norm_weight.to(device)
    values, scale = kernel.quantize(x.to(device), there, EPS, swiglu)
    found = Quantized(values.cpu(), scale.cpu())
    wanted = silu_and_mul(x.float()) if swiglu else x.float()
    if norm_weight is not None:
        wanted = rms_norm(wanted, norm_weight.float(), EPS)
    if dtype == torch.float32 and e4m3 == "native":
        # the interpreter loses what rounding carries into the exponent
        assert share_exact(found, wanted) > 0.95
    else:
        assert share_exact(found, wanted, 0.501 if dtype == torch.float32 else 0.6) == 1
    assert torch.equal(found.values[0].float().abs().amax(), torch.tensor(LARGEST))


def test_refuses_rows_that_are_too_long() -> None:
    with pytest.raises(ValueError, match="x: got 32769 columns, expected at most 32768"):
        kernel.quantize(torch.zeros(1, 32769), None, EPS, False)


def test_cublas_multiplies_8_bits_by_rows_and_columns() -> None:
    """On a CPU torch takes the same arguments, where it is new enough."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = quantize(torch.randn(33, 64, device=device))
    weight = quantize(torch.randn(48, 64, device=device) * 3)
    found = linear._scaled_product(x, weight, None)
    wanted = dequantized(x) @ dequantized(weight).T
    assert (found.float() - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize("num_weights", [48, 50])
@pytest.mark.parametrize("has_out", [False, True])
def test_logits_of_many_rows(num_weights: int, has_out: bool) -> None:
    """In float32, whatever their number is divisible by."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, norm_weight = torch.randn(33, 64, device=device), torch.rand(64, device=device) + 0.5
    weight = quantize(torch.randn(num_weights, 64, device=device) * 3)
    out = torch.full((33, num_weights), torch.nan, device=device) if has_out else None
    found = linear._scaled_logits(x, norm_weight, EPS, weight, out)
    assert out is None or found is out
    normed = rms_norm(x, norm_weight, EPS)
    if num_weights % 16 == 0:
        normed = dequantized(quantize(normed))
    wanted = normed @ dequantized(weight).T
    # a number of x at the middle of two steps of e4m3 may be rounded to either
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 65, 256])
@pytest.mark.parametrize("vocab_size", [264, 151936])
def test_the_head(vocab_size: int, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    weight = quantize(torch.randn(vocab_size, 4096, device="cuda").bfloat16() / 64)
    norm_weight = (torch.rand(4096, device="cuda") + 0.5).bfloat16()
    out = torch.full((rows, vocab_size), torch.nan, device="cuda")
    found = linear.norm_linear(x, norm_weight, EPS, weight, torch.float32, out)
    assert found is out
    wanted = rms_norm(x, norm_weight, EPS).float() @ dequantized(weight).T
    is_ours = choose("logits", rows, vocab_size, 4096, is_fp8=True) is not None
    is_exact = is_ours or vocab_size % 16
    assert (found - wanted).norm() < (1e-2 if is_exact else 5e-2) * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 65, 2048])
@pytest.mark.parametrize("kind", SHAPES_8B)
def test_products_at_8b(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    num_weights, inner = SHAPES_8B[kind]
    torch.set_default_device("cuda")
    try:
        x = (torch.randn(rows, inner) * (torch.rand(rows, 1) + 0.1)).bfloat16()
        weight = quantize(torch.randn(num_weights, inner).bfloat16() / inner**0.5)
        norm_weight = (torch.rand(inner) + 0.5).bfloat16()
        residual = torch.randn(rows, num_weights).bfloat16()
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
        factor = torch.ones(inner) if kind == "add" else norm_weight.float()
        wanted = (x.float() if kind == "add" else normed * factor) @ dequantized(weight).T
        if kind == "add":
            wanted += residual.float()
            out = torch.full_like(residual, torch.nan)
            found: Matrix = linear.linear_add(x, weight, residual, out)
            assert found is out
        elif kind == "norm":
            found = linear.norm_linear(x, norm_weight, EPS, weight)
        else:
            gate, up = wanted.chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
            found = linear.norm_swiglu(x, norm_weight, EPS, weight)
            is_quantized = rows > linear.MAX_FUSED_ROWS and this_device().has_fp8
            assert isinstance(found, Quantized) == is_quantized
        error = (dequantized(found) - wanted).norm() / wanted.norm()
        is_exact = choose(kind, rows, num_weights, inner, is_fp8=True) is not None
        assert error < (1e-2 if is_exact else 8e-2)
        if isinstance(found, Quantized):  # as the MLP continues
            down = quantize(torch.randn(4096, num_weights // 2).bfloat16() / inner**0.5)
            stream = torch.randn(rows, 4096).bfloat16()
            wanted = stream.float() + dequantized(found) @ dequantized(down).T
            out = linear.linear_add(found, down, stream)
            assert (out.float() - wanted).norm() < 2e-2 * wanted.norm()
    finally:
        torch.set_default_device("cpu")
