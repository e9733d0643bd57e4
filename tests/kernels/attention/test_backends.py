"""Choice of the attention backend."""

import pytest
import torch

from penstock.kernels.attention.backends import (
    AttentionBackend,
    GpuAttention,
    TorchAttention,
    choose_attention,
)
from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from tests.kernels.conftest import paged_cache

CPU = torch.device("cpu")
SIZES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "max_rows": 4}


def choose(
    name: str, block_size: int = 0, device: torch.device = CPU, kv_cache_dtype: str = "auto"
) -> AttentionBackend:
    return choose_attention(name, block_size, **SIZES, device=device, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_has_the_reference(name: str) -> None:
    attention = choose(name)
    assert type(attention) is TorchAttention
    assert (attention.name, attention.block_size, attention.scale) == ("torch", 16, 0.125)
    assert not attention.can_be_captured
    assert choose(name, 48).block_size == 48


@pytest.mark.parametrize(("num_decode", "chunks"), [(0, [5]), (2, [5]), (2, [])])
def test_kernels_of_both_kinds_share_a_step(
    num_decode: int, chunks: list[int], device: str, dtype: torch.dtype
) -> None:
    """The lists of their items are made for what the step has."""
    triton_decode = pytest.importorskip("penstock.kernels.attention.triton_decode")
    triton_prefill = pytest.importorskip("penstock.kernels.attention.triton_prefill")
    counts = [1] * num_decode + chunks
    lengths = [20] * num_decode + [600] * len(chunks)
    cache, table = paged_cache(lengths, 16, 1, 16, void=0.0)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        BatchShape(len(counts), sum(counts), num_decode, len(chunks), 64, 5, 600),
        *[torch.empty(0)] * 3,
        cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        cu_seqlens_k=torch.empty(0),
        context_lens=context_lens,
        decode_lens=context_lens[:num_decode],
        tiles=torch.tensor([[num_decode, 0]] * len(chunks), device=device).int(),
        block_tables=table.to(device),
    )
    decode = triton_decode.DecodeAttention(4, 2, 1, 16, 16, device)
    prefill = triton_prefill.PrefillAttention(2, 16, 16, device, num_programs=4)
    prefill._items.zero_()
    q = torch.randn(sum(counts), 2, 16, dtype=dtype, device=device)
    kv_cache = KVCache(*cache.to(dtype).to(device))
    attention = GpuAttention("triton", 16, 0.25, decode, prefill, prefill.plan)
    attention.begin(batch)
    expected = TorchAttention(16, 0.25)(q, kv_cache, batch)
    limits = {"rtol": 1.6e-2, "atol": 4e-3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(attention(q, kv_cache, batch), expected, **limits)


@pytest.mark.parametrize("name", ["triton", "flash-attn"])
def test_a_cpu_has_no_other(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"attention: got '{name}' without a GPU, expected 'torch'"
    ):
        choose(name)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "is_deterministic", "sentence"),
    [
        ("flash-attn", "auto", False, r"install flash-attn 2\.8 or use 'triton'"),
        ("torch", "auto", True, "got 'torch' with --deterministic, expected 'trit"),
        ("flash-attn", "auto", True, "got 'flash-attn' with --deterministic, expected 'trit"),
        # bits depended on the number of rows
        ("triton", "fp8", True, "got 'fp8' with --deterministic on a GPU"),
        ("flash-attn", "fp8", False, "got 'flash-attn' with a KV cache in fp8, expected 'trit"),
    ],
)
def test_what_a_gpu_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    name: str,
    kv_cache_dtype: str,
    is_deterministic: bool,
    sentence: str,
) -> None:
    monkeypatch.setattr("penstock.kernels.attention.backends.find_spec", lambda _: None)
    if is_deterministic:
        request.getfixturevalue("deterministic")
    with pytest.raises(ValueError, match=sentence):
        choose(name, 0, torch.device("cuda"), kv_cache_dtype)


def test_flash_attn_takes_blocks_of_256_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.attention.backends.find_spec", lambda _: object())
    with pytest.raises(ValueError, match="block_size: got 128, expected a multiple of 256"):
        choose("flash-attn", 128, torch.device("cuda"))
    attention = choose("flash-attn", device=torch.device("cuda"))
    assert (attention.name, attention.block_size) == ("flash-attn", 256)
    assert attention.can_be_captured
