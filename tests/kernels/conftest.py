"""Fixtures of kernel tests: on a GPU, or without one in Triton's interpreter."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from penstock.kernels import triton_elementwise
from penstock.kernels.device import Device
from penstock.kernels.extras import use_deterministic_kernels
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.matrices import FP8, Matrix, Quantized


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.interpreter import speed_up

        speed_up()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Return the device of a test's tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """Return the type of activations: the interpreter can't compute in bfloat16."""
    return torch.bfloat16 if device == "cuda" else torch.float32


E4M3 = ("native", "by integers")


@pytest.fixture(params=E4M3)
def e4m3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how kernels convert e4m3; by integers: as on GPUs without instructions for it."""
    if request.param == "by integers":
        ampere = Device((8, 0), 163 << 10, 108)
        monkeypatch.setattr(triton_elementwise, "this_device", lambda: ampere)
    return str(request.param)


def in_8_bits(kv_cache: KVCache) -> KVCache:
    """Return the same numbers, quantised by the reference; NaN stays so."""
    device, (num_blocks, block_size, num_kv_heads, _) = kv_cache.k.device, kv_cache.k.shape
    k, v = kv_cache.k.cpu(), kv_cache.v.cpu()
    scales = tuple(torch.empty(2, num_blocks, num_kv_heads, block_size))
    quantized = KVCache(torch.empty_like(k, dtype=FP8), torch.empty_like(v, dtype=FP8), scales)
    quantized.store(torch.arange(num_blocks * block_size), k.flatten(0, 1), v.flatten(0, 1))
    return on(device, quantized)


def paged_cache(
    lengths: list[int], block_size: int, num_kv_heads: int, head_dim: int, void: float = torch.nan
) -> tuple[Tensor, Tensor]:
    """Return random keys and values [2, blocks, …] of some sequences, and their block tables.

    Blocks lie in a random order, the last one of each table is not used, and what belongs to no
    token is `void`.
    """
    max_blocks = -(-max(*lengths, 1) // block_size) + 1
    num_blocks = len(lengths) * max_blocks
    table = torch.randperm(num_blocks).view(len(lengths), max_blocks).int()
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), void)
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        new = torch.randn(2, length, num_kv_heads, head_dim)
        cache[:, table[row, at // block_size].long(), at % block_size] = new
    return cache, table


def there(device: str, weight: Matrix) -> Matrix:
    """Return the same weight on a device."""
    if isinstance(weight, Tensor):
        return weight.to(device)
    assert isinstance(weight, Quantized)
    return Quantized(weight.values.to(device), weight.scale.to(device), weight.dtype)


def on(device: str | torch.device, kv_cache: KVCache) -> KVCache:
    """Return the same cache there."""
    k, v, scales = kv_cache
    moved = scales and (scales[0].to(device), scales[1].to(device))
    return KVCache(k.to(device), v.to(device), moved)


def numbers_of(kv_cache: KVCache) -> KVCache:
    """Return the values of a cache, in float32 on the CPU, with 0 in place of NaN."""
    k, v, scales = on("cpu", kv_cache)
    k_scale, v_scale = (s.transpose(1, 2).unsqueeze(3) for s in scales or torch.ones(2, 1, 1, 1))
    return KVCache((k.float() * k_scale).nan_to_num(), (v.float() * v_scale).nan_to_num())


def on_gpu(*values: Any) -> Any:
    """Return a parameter that is run on a GPU only.

    The interpreter is slow, and other values take the same branches of the kernel.
    """
    return pytest.param(*values, marks=pytest.mark.gpu)


def by_turns(names: str, *cases: Any) -> Any:
    """Return a test's parameters `names`, and `e4m3`: one way of it for each case in turn.

    The other way is for `make test-long`.
    """
    with_ways = [
        pytest.param(
            *(case.values if isinstance(case, ParameterSet) else case),
            way,
            marks=[
                *(case.marks if isinstance(case, ParameterSet) else ()),
                *([] if (number + turn) % 2 == 0 else [pytest.mark.long]),
            ],
        )
        for number, case in enumerate(cases)
        for turn, way in enumerate(E4M3)
    ]
    return pytest.mark.parametrize(f"{names}, e4m3", with_ways, indirect=["e4m3"])


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Use the kernels of `--deterministic`."""
    use_deterministic_kernels(True)
    yield
    use_deterministic_kernels(False)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add products in steps of 16, each rounded once, as tensor cores do.

    Otherwise BLAS adds them in an order that depends on the numbers of rows and columns.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        acc, wide_a, wide_b = d.data, a.data.astype(np.float64), b.data.astype(np.float64)
        for k in range(0, a.data.shape[-1], 16):
            one, other = wide_a[..., k : k + 16, None], wide_b[..., None, k : k + 16, :]
            acc = (acc + (one * other).sum(-2)).astype(np.float32)
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
