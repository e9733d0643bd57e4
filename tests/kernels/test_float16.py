"""Kernels in float16: exactness, and numbers near the end of its range."""

import pytest
import torch

from penstock.kernels.elementwise import quantize, rms_norm, silu_and_mul
from penstock.kernels.linear import linear, small_m_gemm
from penstock.kernels.linear.small_m_gemm import multiply
from penstock.kernels.linear.tile_sizes import GemmConfig
from penstock.kernels.matrices import Quantized
from penstock.kernels.triton_moe import experts
from tests.kernels.attention.test_triton_decode import (
    LENGTHS,
    MANY_SPLITS,
    Layout,
    Step,
    attention_for,
)
from tests.kernels.attention.test_triton_prefill import SHORT, assert_right, random_case
from tests.kernels.conftest import in_8_bits, there
from tests.kernels.linear.test_small_m_gemm import (
    CONFIGS,
    EPS,
    GEMVS,
    KINDS,
    SPLITS,
    check,
    product,
)
from tests.kernels.moe.test_triton_moe import SMALL, expected, operands
from tests.kernels.moe.test_triton_moe import in_8_bits as experts_in_8_bits
from tests.search import diagonal

pytestmark = pytest.mark.slow
HALF = torch.float16
LARGE = 3000.0
"""a number of a residual stream, whose square exceeds float16"""


WAYS = (1, GEMVS["whole"]), (1, GEMVS["in turn"]), (3, CONFIGS["mma"]), (17, SPLITS["mma by 2"])


@pytest.mark.parametrize(("kind", "way"), diagonal(KINDS, WAYS))
def test_products(kind: str, way: tuple[int, GemmConfig], device: str) -> None:
    rows, config = way
    check(product(kind, rows, 160, 48, HALF), config, device)


@pytest.mark.parametrize(("kind", "rows"), diagonal(["add", "norm", "swiglu"], [1, 5]))
def test_products_with_weights_in_8_bits(kind: str, rows: int, device: str) -> None:
    operands = product(kind, rows, 160, 48, HALF)
    weight = quantize(operands.weight.float())  # type: ignore[union-attr]
    check(operands._replace(weight=weight), GEMVS["whole"] if rows == 1 else CONFIGS["mma"], device)


@pytest.mark.parametrize("rows", [1, 9])
def test_the_norm_of_large_numbers(rows: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """No kernel squares them in float16, whatever was measured in bfloat16."""
    inside = GemmConfig("mma", 16, 32, 1, 4, 3, 64, norm_inside=True)
    if rows > 1:
        monkeypatch.setattr(small_m_gemm, "choose", lambda *_: inside)
    x = torch.randn(rows, 64)
    x[:, 7] = LARGE
    x, weight = x.to(HALF), (torch.randn(96, 64) / 8).to(HALF)
    norm_weight = torch.ones(64, dtype=HALF)
    moved = (one.to(device) for one in (x, weight, norm_weight))
    found = multiply("norm", *moved, EPS)
    assert found is not None
    wanted = rms_norm(x.float(), norm_weight.float(), EPS) @ weight.float().T
    assert (found.cpu().float() - wanted).norm() < 5e-3 * wanted.norm()


@pytest.mark.parametrize("fp8", [False, True])
def test_decode_attention(fp8: bool, device: str) -> None:
    layout = Layout(4, 2, 32, 64)
    step = Step(layout, LENGTHS, device, HALF, fp8=fp8)
    step.check(step.run(attention_for(layout, device, MANY_SPLITS, max_rows=len(LENGTHS))))


@pytest.mark.parametrize("fp8", [False, True])
def test_prefill_attention(fp8: bool, device: str) -> None:
    case = random_case(SHORT, (4, 2), 64, 64, HALF)
    if fp8:
        case = case._replace(kv_cache=in_8_bits(case.kv_cache))
    assert_right(case, case.run(device, 64))


@pytest.mark.parametrize("fp8", [False, True])
def test_experts(fp8: bool, device: str) -> None:
    x, logits, *weights = operands(20, 6, 40, 24)
    given = [experts_in_8_bits(one) if fp8 else one.to(HALF) for one in weights]
    plain = [one.dequantized() if isinstance(one, Quantized) else one.float() for one in given]
    wanted = expected(x, logits, *plain, 3, True, 0)
    moved = [there(device, weight) for weight in given]
    out = experts(x.to(device, HALF), logits.to(device), *moved, 3, True, tuning=SMALL)
    assert out.dtype == HALF
    assert (out.cpu().float() - wanted).norm() < 1e-2 * wanted.norm()


def test_the_reference_on_a_cpu() -> None:
    """Norm, products and activation of the reference compute in float16, too."""
    x, weight = (torch.randn(5, 64) * 100).to(HALF), (torch.randn(96, 64) / 8).to(HALF)
    norm_weight = torch.ones(64, dtype=HALF)
    wanted = rms_norm(x.float(), norm_weight.float(), EPS) @ weight.float().T
    found = linear.norm_linear(x, norm_weight, EPS, weight)
    assert found.dtype == HALF
    assert (found.float() - wanted).norm() < 5e-3 * wanted.norm()
    swiglu = linear.norm_swiglu(x, norm_weight, EPS, weight)
    assert isinstance(swiglu, torch.Tensor)
    assert (swiglu.float() - silu_and_mul(wanted)).norm() < 1e-2 * silu_and_mul(wanted).norm()


def test_activations_in_8_bits_keep_the_type_of_their_product(device: str) -> None:
    for dtype in (HALF, torch.bfloat16):
        x = quantize(torch.randn(3, 32).to(device, dtype))
        assert x.dtype == dtype
        weight = quantize(torch.randn(16, 32).to(device))
        found = linear._scaled_product(x, weight, None)
        assert found.dtype == dtype
        out = torch.full((3, 16), torch.nan, dtype=dtype, device=device)
        assert linear._scaled_product(x, weight, out) is out
        assert torch.equal(out, found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("fp8", [False, True])
def test_layers_in_float16(rows: int, fp8: bool) -> None:
    x = torch.randn(rows, 1024, device="cuda", dtype=HALF)
    norm_weight = torch.ones(1024, device="cuda", dtype=HALF)
    weight = torch.randn(4096, 1024, device="cuda") / 32
    given = quantize(weight) if fp8 else weight.to(HALF)
    plain = given.dequantized() if isinstance(given, Quantized) else given.float()
    wanted = rms_norm(x, norm_weight, EPS).float() @ plain.T
    most = 5e-2 if fp8 else 5e-3
    for out_dtype in (None, torch.float32):
        found = linear.norm_linear(x, norm_weight, EPS, given, out_dtype)
        assert found.dtype == (out_dtype or HALF)
        assert (found.float() - wanted).norm() < most * wanted.norm()
    residual = torch.randn(rows, 4096, device="cuda", dtype=HALF)
    wanted = x.float() @ plain.T + residual.float()
    found = linear.linear_add(x, given, residual)
    assert found.dtype == HALF
    assert (found.float() - wanted).norm() < most * wanted.norm()
