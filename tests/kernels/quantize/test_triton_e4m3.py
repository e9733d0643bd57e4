"""Conversions of e4m3 by integer operations, against torch's, and products with such weights."""

import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels.device import Device
from penstock.kernels.elementwise import quantize, quantize_blocks
from penstock.kernels.linear import linear
from penstock.kernels.linear.triton_fp8_gemm import weight_only_product
from penstock.kernels.matrices import FP8, Quantized
from penstock.kernels.triton_elementwise import narrow, widen
from tests.kernels.conftest import E4M3, there
from tests.search import diagonal


@triton.jit
def _widen_all(codes, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, widen(tl.load(codes + at)).to(out.dtype.element_ty))


@triton.jit
def _narrow_all(x, codes, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(codes + at, narrow(tl.load(x + at), tl.uint8))


def narrowed(x: torch.Tensor, device: str) -> torch.Tensor:
    codes = torch.empty(len(x), dtype=torch.uint8, device=device)
    _narrow_all[(len(x) // 256,)](x.to(device), codes, 256)
    return codes.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_code_is_widened_exactly(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, dtype=dtype, device=device)
    _widen_all[(1,)](codes.to(device), out, 256)
    expected = codes.view(FP8).to(dtype)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert out.cpu().isnan().nonzero().flatten().tolist() == [127, 255]
    assert torch.equal(out.cpu().signbit()[:127], torch.zeros(127, dtype=torch.bool))
    assert out.cpu().signbit()[128:255].all()  # also of -0.0


def test_every_code_is_narrowed_to_itself(device: str) -> None:
    codes = torch.arange(256).to(torch.uint8)
    found = narrowed(codes.view(FP8).float(), device)
    assert torch.equal(found[:255], codes[:255])
    assert found[255] in (127, 255)  # NaN


def test_numbers_are_rounded_as_torch_does(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(1 << 14, generator=generator)
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2  # ties, to nearest even
    near = torch.cat([middles, middles * (1 + 2**-23), middles * (1 - 2**-23)])
    x = torch.cat([random, random * 1e-3, random * 100, near, -near]).clamp(-448, 448)
    x = torch.cat([x, x.new_zeros(-len(x) % 256)])
    found = narrowed(x, device).view(FP8).float()
    assert torch.equal(found, x.to(FP8).float())


def test_larger_numbers_are_stored_as_the_largest(device: str) -> None:
    x = torch.tensor([449.0, 1e30, torch.inf, -torch.inf]).repeat(64)
    assert narrowed(x, device).view(FP8).float()[:4].tolist() == [448, 448, 448, -448]


@pytest.mark.slow
@pytest.mark.usefixtures("e4m3")
@pytest.mark.parametrize(
    ("sizes", "quantizer", "dtype", "e4m3"),
    diagonal(
        [(5, 144, 272), (70, 128, 130)],
        [quantize, quantize_blocks],
        [torch.float16, torch.float32],
        E4M3,
    ),
    indirect=["e4m3"],
)
def test_products_of_any_number_of_rows(
    sizes: tuple[int, int, int], quantizer: object, dtype: torch.dtype, device: str
) -> None:
    rows, inner, columns = sizes
    x = torch.randn(rows, inner).to(dtype)
    weight: Quantized = quantizer(torch.randn(columns, inner))  # type: ignore[operator]
    moved = there(device, weight)
    wanted = x.double() @ weight.dequantized().double().T
    most = 1e-5 if dtype == torch.float32 else 2e-3  # a scaled weight is rounded to x's type
    for out_dtype in (None, torch.float32):
        found = weight_only_product(x.to(device), moved, out_dtype=out_dtype)
        assert found.dtype == (out_dtype or dtype)
        assert (found.cpu().double() - wanted).norm() < most * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 65, 300])
@pytest.mark.parametrize("quantizer", [quantize, quantize_blocks])
def test_layers_without_fp8_units(
    rows: int, quantizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of a layer as sm_80 computes them: nothing but weights is quantized."""
    ampere = Device((8, 0), 163 << 10, 108)
    for module in ("triton_elementwise", "linear.linear", "linear.small_m_gemm"):
        monkeypatch.setattr(f"penstock.kernels.{module}.this_device", lambda: ampere)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    norm_weight = torch.ones(1024, device="cuda").bfloat16()
    weight: Quantized = quantizer(torch.randn(512, 1024, device="cuda") / 32)  # type: ignore[operator]
    wanted = linear.rms_norm(x, norm_weight, 1e-6).float() @ weight.dequantized().T
    logits = linear.norm_linear(x, norm_weight, 1e-6, weight, torch.float32)
    assert (logits - wanted).norm() < 1e-2 * wanted.norm()
    gate, up = wanted.chunk(2, -1)
    swiglu = linear.norm_swiglu(x, norm_weight, 1e-6, weight)
    assert isinstance(swiglu, torch.Tensor)
    wanted = torch.nn.functional.silu(gate) * up
    assert (swiglu.float() - wanted).norm() < 2e-2 * wanted.norm()
