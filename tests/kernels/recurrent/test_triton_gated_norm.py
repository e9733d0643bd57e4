"""The gated norm against its definition."""

import pytest
import torch
from torch.nn import functional

gpu = pytest.importorskip("penstock.kernels.recurrent.triton_gated_norm")


@pytest.mark.parametrize(("heads", "size"), [(3, 128), (5, 24), (1, 2048)])
def test_equals_the_definition(heads: int, size: int, device: str, dtype: torch.dtype) -> None:
    x, fused = torch.randn(7, heads, size), torch.randn(7, heads * size + 5)
    weight = torch.randn(size)
    x, fused, weight = (part.to(device, dtype) for part in (x, fused, weight))
    z = fused[:, : heads * size].view(7, heads, size)
    wide = x.double()
    normed = wide * (wide.square().mean(2, keepdim=True) + 1e-6).rsqrt()
    expected = normed * weight.double() * functional.silu(z.double())
    out = gpu.gated_rms_norm(x, z, weight, 1e-6)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    assert (out.double() - expected).norm() < limit * expected.norm()
