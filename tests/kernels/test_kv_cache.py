"""Keys and values land in their slots, and nowhere else."""

import pytest
import torch

from penstock.kernels.kv_cache import store_kv


def test_stores_each_token_in_its_slot() -> None:
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    store_kv(k, v, k_cache, v_cache, torch.tensor([9, 0, 6]))
    for cache, new in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros(3, 4, 2, 8)
        expected[2, 1], expected[0, 0], expected[1, 2] = new
        assert torch.equal(cache, expected)


def test_takes_slices_of_a_wider_tensor() -> None:
    k_cache, v_cache = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8)
    k, v = torch.randn(2, 32).view(2, 4, 8).split(2, dim=1)
    store_kv(k, v, k_cache, v_cache, torch.tensor([3, 1]))
    assert torch.equal(k_cache[0, 3], k[0])
    assert torch.equal(v_cache[0, 1], v[1])


def test_refuses_what_does_not_fit() -> None:
    k, cache, slots = torch.zeros(2, 2, 8), torch.zeros(3, 4, 2, 8), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[2\]; \[1\] is needed"):
        store_kv(k[:1], k[:1], cache, cache, slots)
    with pytest.raises(ValueError, match="slot_mapping has dtype"):
        store_kv(k, k, cache, cache, slots.int())
    with pytest.raises(ValueError, match=r"v_cache has shape \[3, 4, 2, 8\]; \[2, 4, 2, 8\]"):
        store_kv(k, k, cache[:2], cache, slots)
    with pytest.raises(ValueError, match="k_cache has strides"):
        store_kv(k, k, torch.zeros(4, 3, 2, 8).transpose(0, 1), cache, slots)
