"""RMSNorm, the activation and RoPE with its store, against the torch references."""

import copy

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.elementwise import (
    add_gated,
    rms_norm_reference,
    sigmoid_and_mul,
    silu_and_mul_reference,
)
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.models.layers import rope_table
from tests.kernels.conftest import in_8_bits, on
from tests.search import diagonal

kernels = pytest.importorskip("penstock.kernels.triton_elementwise")
rope = pytest.importorskip("penstock.kernels.attention.triton_rope")

EPS = 1e-6
LIMITS = {torch.float32: 1e-5, torch.float16: 1.25e-4}
"""of relative errors; for 16 bits about 1 element in 16 may be rounded to the next number, so that
a rounding too many or too few is found"""
if torch.cuda.is_available():
    LIMITS[torch.bfloat16] = 1e-3  # the interpreter rounds to bfloat16 by cutting off
pytestmark = pytest.mark.parametrize("dtype", LIMITS)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """By the norm of the difference; what is NaN in `expected` must be so in `actual`."""
    limit = LIMITS[actual.dtype]
    actual, expected = actual.double().cpu(), expected.double()
    assert torch.equal(actual.isnan(), expected.isnan())
    difference = (actual - expected).nan_to_num().norm()
    assert difference <= limit * expected.nan_to_num().norm()


@pytest.mark.parametrize(
    ("num_rows", "size", "is_wide"),
    diagonal([0, 1, 3, 17], [48, 128, 1024, 2560, 16384], [False, True]),
)
def test_rms_norm(num_rows: int, size: int, is_wide: bool, device: str, dtype: torch.dtype) -> None:
    x = (torch.randn(num_rows, size) * torch.rand(num_rows, 1) * 10).to(dtype)
    weight = torch.rand(size).to(torch.float32 if is_wide else dtype)
    expected = rms_norm_reference(x, weight, EPS)
    assert_near(kernels.rms_norm(x.to(device), weight.to(device), EPS), expected)


def test_rms_norm_refuses_rows_that_are_too_long(device: str, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 16385, dtype=dtype, device=device)
    with pytest.raises(ValueError, match="x: got 16385 columns, expected at most 16384"):
        kernels.rms_norm(x, x[0], EPS)


@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (1, 3072), (5, 33), (9, 1024)])
def test_silu_and_mul(num_tokens: int, size: int, device: str, dtype: torch.dtype) -> None:
    x = (torch.randn(num_tokens, 2 * size) * 20).to(dtype)
    expected = silu_and_mul_reference(x)
    assert_near(kernels.silu_and_mul(x.to(device)), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter
@pytest.mark.parametrize("gate", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_silu_and_mul_is_finite_at_the_ends(gate: float, device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[gate, 1.0]]).to(dtype)
    assert_near(kernels.silu_and_mul(x.to(device)), silu_and_mul_reference(x))


@pytest.mark.parametrize(("num_tokens", "heads", "size"), [(0, 4, 64), (1, 24, 256), (5, 3, 33)])
def test_sigmoid_and_mul(
    num_tokens: int, heads: int, size: int, device: str, dtype: torch.dtype
) -> None:
    x = torch.randn(num_tokens, heads, size).to(dtype)
    joined = (torch.randn(num_tokens, heads * 2 + 1, size) * 20).to(dtype)
    expected = sigmoid_and_mul(joined[:, : 2 * heads].unflatten(1, (heads, 2))[:, :, 1], x)
    gate = joined.to(device)[:, : 2 * heads].unflatten(1, (heads, 2))[:, :, 1]
    assert_near(kernels.sigmoid_and_mul(gate, x.to(device)), expected)


@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (1, 2048), (5, 33), (9, 1024)])
def test_add_gated(num_tokens: int, size: int, device: str, dtype: torch.dtype) -> None:
    out, x, gate_input = torch.randn(3, num_tokens, size).to(dtype)
    norm_weight, weight = torch.rand(size) + 0.5, (torch.randn(1, size) * size**-0.5).to(dtype)
    gate_input[::2] *= 1e-3  # small enough that EPS counts
    gate_input[1::2] *= 20
    tensors = out, x, gate_input, norm_weight, weight
    actual, *others, norm, gate = (tensor.to(device, copy=True) for tensor in tensors)
    kernels.add_gated(actual, *others, norm, EPS, gate)
    *wide, norm, gate = (tensor.float() for tensor in tensors)
    expected = add_gated(*wide, norm, EPS, gate).to(dtype)
    assert_near(actual, expected)


def store_by_both(
    kv_cache: KVCache,
    num_heads: int,
    slots: list[int],
    device: str,
    dtype: torch.dtype,
    rotated: int = 0,
) -> KVCache:
    """Compare queries of random tokens, and store into `kv_cache` what the reference does.

    rotated: as in Qwen3.5, only these features of a head are rotated, a gate follows each query
    head, and the weights of norms are float32. Returns what the kernel stores. The first block is
    given to none, so that slot -1 can be seen to stay as it is.
    """
    (num_kv_heads, head_dim), num_tokens = kv_cache.k.shape[2:], len(slots)
    num_parts = num_heads * (2 if rotated else 1) + 2 * num_kv_heads
    qkv = (torch.randn(num_tokens, num_parts * head_dim) * 3).to(dtype)
    weights = tuple(torch.rand(2, head_dim).to(torch.float32 if rotated else dtype))
    table = rope_table(rotated or head_dim, num_positions=500, base=1e4)
    positions = torch.randint(500, (num_tokens,))
    stored = on(device, copy.deepcopy(kv_cache))
    q = rope.qk_norm_rope_store(
        qkv.to(device),
        tuple(weight.to(device) for weight in weights),
        table.to(device),
        positions.to(device),
        torch.tensor(slots, device=device),
        behind_first_block(stored),
        EPS,
        rotated > 0,
    )
    expected = qk_norm_rope_store(
        qkv,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_weight=weights[0],
        k_weight=weights[1],
        rope=table,
        positions=positions,
        slot_mapping=torch.tensor(slots),
        kv_cache=behind_first_block(kv_cache),
        eps=EPS,
        gated=rotated > 0,
    )
    kept = torch.tensor(slots) >= 0
    assert_near(q.cpu()[kept], expected[kept])
    return on("cpu", stored)


def behind_first_block(kv_cache: KVCache) -> KVCache:
    k, v, scales = kv_cache
    return KVCache(k[1:], v[1:], scales and (scales[0][1:], scales[1][1:]))


HEADS_AND_SLOTS = [(16, 8, [5]), (32, 8, [95, -1, 0, 33]), (5, 1, [3, 4, -1]), (40, 10, [-1, 7])]
HeadsAndSlots = tuple[int, int, list[int]]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), diagonal(HEADS_AND_SLOTS, [64, 128]))
def test_qk_norm_rope_store(
    heads: HeadsAndSlots, head_dim: int, device: str, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, slots = heads
    expected = KVCache(*torch.full((2, 7, 16, num_kv_heads, head_dim), torch.nan).to(dtype))
    stored = store_by_both(expected, num_heads, slots, device, dtype)
    assert_near(stored.k, expected.k)
    assert_near(stored.v, expected.v)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "rotated"), [(256, 64), (64, 32)])
def test_a_part_of_each_head_is_rotated(
    head_dim: int, rotated: int, device: str, dtype: torch.dtype
) -> None:
    slots = [5, -1, 80]
    expected = KVCache(*torch.full((2, 7, 16, 2, head_dim), torch.nan).to(dtype))
    stored = store_by_both(expected, 12, slots, device, dtype, rotated)
    assert_near(stored.k, expected.k)
    assert_near(stored.v, expected.v)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "block_size"), diagonal(HEADS_AND_SLOTS, [16, 48]))
def test_8_bits_are_stored(
    heads: HeadsAndSlots, block_size: int, device: str, dtype: torch.dtype, e4m3: str
) -> None:
    num_heads, num_kv_heads, slots = heads
    kv_cache = KVCache(*torch.full((2, 7, block_size, num_kv_heads, 64), torch.nan).to(dtype))
    expected = in_8_bits(kv_cache)
    stored = store_by_both(expected, num_heads, slots, device, dtype)
    for scale, expected_scale in zip(stored.scales or (), expected.scales or (), strict=True):
        # the reference rounds keys to `dtype` before
        torch.testing.assert_close(scale, expected_scale, rtol=4e-3, atol=0, equal_nan=True)
    for numbers, expected_numbers in zip(stored[:2], expected[:2], strict=True):
        assert torch.equal(numbers.isnan(), expected_numbers.isnan())
        known = numbers.float()[~numbers.isnan()]
        equal = known == expected_numbers.float()[~numbers.isnan()]
        # the interpreter's own conversion forgets to carry when it rounds up to a power of two, and
        # from bfloat16 the reference rounds more keys to the other neighbour
        rounded = 0.95 if dtype == torch.bfloat16 else 0.98
        assert equal.float().mean() > (0.9 if e4m3 == "native" else rounded)


def test_rope_refuses_an_odd_head_dim(device: str, dtype: torch.dtype) -> None:
    kv_cache = KVCache(*torch.zeros(2, 1, 4, 1, 48, dtype=dtype, device=device))
    qkv, unused = torch.zeros(1, 3 * 48, dtype=dtype, device=device), torch.zeros(1)
    with pytest.raises(ValueError, match="head_dim: got 48, expected a power of 2, 16 or more"):
        rope.qk_norm_rope_store(qkv, (unused, unused), unused, unused, unused, kv_cache, EPS)


@pytest.mark.parametrize("size", [64, 1024, 2560])
def test_embedding(device: str, dtype: torch.dtype, size: int) -> None:
    weight = torch.randn(50, size).to(device, dtype)
    ids = torch.randint(50, (7,), device=device)
    assert torch.equal(kernels.embedding(ids, weight), weight[ids])
