"""Choice of the attention backend."""

import pytest
import torch

from penstock.kernels.attention.backends import (
    AttentionBackend,
    TorchAttention,
    choose_attention,
)

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
