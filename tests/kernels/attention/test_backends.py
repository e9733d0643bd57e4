"""Choice of the attention backend."""

import pytest
import torch

from penstock.kernels.attention.backends import (
    AttentionBackend,
    TorchAttention,
    choose_attention,
)
from penstock.kernels.extras import use_deterministic_kernels

CPU = torch.device("cpu")
SIZES = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "max_rows": 4}


def choose(name: str, block_size: int = 0, device: torch.device = CPU) -> AttentionBackend:
    return choose_attention(name, block_size, **SIZES, device=device)


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


def test_flash_attn_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.attention.backends.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"install flash-attn 2\.8 or use 'triton'"):
        choose("flash-attn", device=torch.device("cuda"))


@pytest.mark.parametrize("name", ["torch", "flash-attn"])
def test_only_triton_has_fixed_splits(name: str) -> None:
    use_deterministic_kernels(True)
    try:
        with pytest.raises(ValueError, match=f"got '{name}' with --deterministic, expected 'trit"):
            choose(name, device=torch.device("cuda"))
    finally:
        use_deterministic_kernels(False)


def test_fixed_splits_read_no_8_bits() -> None:
    """Bits depended on the number of rows."""
    use_deterministic_kernels(True)
    try:
        with pytest.raises(ValueError, match="got 'fp8' with --deterministic on a GPU"):
            choose_attention(
                "triton", 0, **SIZES, device=torch.device("cuda"), kv_cache_dtype="fp8"
            )
    finally:
        use_deterministic_kernels(False)


def test_flash_attn_reads_no_8_bits() -> None:
    with pytest.raises(
        ValueError, match="got 'flash-attn' with a KV cache in fp8, expected 'triton'"
    ):
        choose_attention(
            "flash-attn", 0, **SIZES, device=torch.device("cuda"), kv_cache_dtype="fp8"
        )


def test_flash_attn_takes_blocks_of_256_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.attention.backends.find_spec", lambda _: object())
    with pytest.raises(ValueError, match="block_size: got 128, expected a multiple of 256"):
        choose("flash-attn", 128, torch.device("cuda"))
    attention = choose("flash-attn", device=torch.device("cuda"))
    assert (attention.name, attention.block_size) == ("flash-attn", 256)
    assert attention.can_be_captured
