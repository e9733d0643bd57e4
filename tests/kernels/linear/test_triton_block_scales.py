"""Products with weights of 8 bits whose blocks have scales, by every kernel."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.elementwise import quantize, quantize_blocks
from penstock.kernels.linear.small_m_gemm import GemmConfig
from penstock.kernels.linear.triton_fp8_gemm import block_product
from penstock.kernels.matrices import Quantized
from tests.kernels.conftest import by_turns, on_gpu, there
from tests.kernels.linear.test_small_m_gemm import CONFIGS, GEMVS, SPLITS, check, product

WIDE = GemmConfig("mma", 16, 256, 1, 4, 3, 0)
SLICED = GemmConfig("slices", 16, 1024, 1, 4, 1, 0)


@pytest.mark.slow
@by_turns(
    "kind, rows, inner, columns, config",
    ("norm", 1, 272, 160, GemmConfig("gemv", 8, 512, 1, 4, 1, 0)),
    ("swiglu", 1, 400, 128, GEMVS["in turn"]),
    ("add", 1, 272, 160, GEMVS["whole"]),
    ("add", 3, 304, 144, CONFIGS["mma"]),
    ("swiglu", 17, 272, 128, CONFIGS["slices"]),
    ("plain", 3, 400, 144, WIDE),
    ("swiglu", 3, 400, 128, SLICED),
    ("norm", 3, 1024, 144, GemmConfig("ranges", 16, 256, 1, 4, 2, 0, norm_inside=True)),
    ("swiglu", 3, 272, 128, SPLITS["mma by 2"]),
    ("add", 3, 272, 144, SPLITS["slices by 3"]),
    on_gpu("swiglu", 64, 1024, 3072, GemmConfig("mma", 64, 128, 2, 4, 3, 0)),
    on_gpu("add", 33, 3072, 1024, GemmConfig("slices", 32, 512, 2, 4, 3, 0)),
)
@pytest.mark.usefixtures("e4m3")
def test_blocks_with_scales(
    kind: str,
    rows: int,
    inner: int,
    columns: int,
    config: GemmConfig,
    device: str,
    dtype: torch.dtype,
) -> None:
    operands = product(kind, rows, inner, columns, dtype)
    check(operands._replace(weight=blocks_of(operands.weight)), config, device)


def blocks_of(weight: Tensor) -> Quantized:
    """In 8 bits, with scales that differ by far from block to block."""
    quantized = quantize_blocks(weight.float())
    factors = torch.logspace(-1, 1, quantized.scale.numel()).view(quantized.scale.shape)
    return Quantized(quantized.values, quantized.scale * factors)


@pytest.mark.parametrize(
    "sizes",
    [
        (130, 256, 144),
        (5, 272, 128),
        (40, 256, 144),
        on_gpu((700, 1024, 3072)),
        on_gpu((64, 4096, 6144)),
    ],
)
def test_many_rows_with_scales_of_blocks(sizes: tuple[int, int, int], device: str) -> None:
    rows, inner, columns = sizes
    x = quantize(torch.randn(rows, inner) * torch.rand(rows, 1))
    weight = blocks_of(torch.randn(columns, inner))
    moved = there(device, x), there(device, weight)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    found = block_product(*moved, out).cpu().double()
    wanted = x.dequantized().double() @ weight.dequantized().double().T
    assert (found - wanted).norm() / wanted.norm() < 4e-3
