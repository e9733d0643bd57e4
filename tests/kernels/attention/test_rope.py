"""Queries, keys and values before attention: the slots in which they land.

What is computed of them is compared with `transformers` in tests/models.
"""

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.matrices import FP8
from penstock.models.layers import rope_table

EPS = 1e-6
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
ROPE = rope_table(HEAD_DIM, num_positions=64, base=1e4)


class Case:
    """Random heads of some tokens and an empty cache of 3 blocks of 4 tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.heads = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        self.q, self.k, self.v = self.heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        self.weights = torch.rand(2, HEAD_DIM)
        self.positions = torch.randint(64, (num_tokens,))
        self.k_cache, self.v_cache = torch.zeros(2, 3, 4, NUM_KV_HEADS, HEAD_DIM)

    def run(self, slots: list[int], rows: slice = slice(None), **changed: object) -> Tensor:
        """Return the queries of some of the tokens, whose keys and values are stored in `slots`."""
        arguments = {
            "qkv": self.heads[rows].flatten(1).contiguous(),
            "num_heads": NUM_HEADS,
            "num_kv_heads": NUM_KV_HEADS,
            "q_weight": self.weights[0],
            "k_weight": self.weights[1],
            "rope": ROPE,
            "positions": self.positions[rows],
            "slot_mapping": torch.tensor(slots),
            "kv_cache": KVCache(self.k_cache, self.v_cache),
            "eps": EPS,
        }
        return qk_norm_rope_store(**{**arguments, **changed})  # type: ignore[arg-type]


def test_stores_each_token_in_its_slot() -> None:
    case = Case(3)
    case.run([9, 0, 6])
    expected = torch.zeros_like(case.v_cache)
    expected[2, 1], expected[0, 0], expected[1, 2] = case.v
    assert torch.equal(case.v_cache, expected)
    assert torch.equal(case.k_cache.flatten(2).any(-1), expected.flatten(2).any(-1))


def test_stores_nothing_for_padding() -> None:
    case = Case(4)
    q = case.run([9, -1, 6, -1])
    padded = case.k_cache.clone(), case.v_cache.clone()
    case.k_cache, case.v_cache = torch.zeros(2, 3, 4, NUM_KV_HEADS, HEAD_DIM)
    assert torch.equal(case.run([9, 6], slice(0, 4, 2)), q[::2])
    assert torch.equal(case.k_cache, padded[0])
    assert torch.equal(case.v_cache, padded[1])


def test_a_token_does_not_depend_on_the_others() -> None:
    case = Case(12)
    q = case.run(list(range(12)))
    k = case.k_cache.clone()
    for first, last in ((0, 1), (3, 4), (5, 12)):
        case.k_cache.zero_()
        some = case.run(list(range(first, last)), slice(first, last))
        assert torch.equal(some, q[first:last])
        assert torch.equal(case.k_cache.flatten(0, 1)[first:last], k.flatten(0, 1)[first:last])


def test_stores_8_bits_near_what_it_stores_otherwise() -> None:
    case = Case(4)
    case.v[1, 0] = 0.0
    slots = [9, -1, 6, 0]
    case.run(slots)
    scales = torch.zeros(2, 3, NUM_KV_HEADS, 4)
    kv_cache = KVCache(*torch.zeros(2, 3, 4, NUM_KV_HEADS, HEAD_DIM).to(FP8), tuple(scales))
    case.run(slots, kv_cache=kv_cache)
    for n, exact in enumerate((case.k_cache, case.v_cache)):
        scale = scales[n].transpose(1, 2).unsqueeze(3)
        absmax = exact.abs().amax(3, keepdim=True)
        torch.testing.assert_close(scale * 448, absmax, rtol=1e-6, atol=1e-9)
        error = (kv_cache[n].float() * scale - exact).abs()
        # half of the last of 3 bits, or of the smallest number
        assert (error <= torch.maximum(exact.abs() / 16, scale / 1024) * (1 + 1e-5)).all()
        assert error.any()


def refusal(**changed: object) -> str:
    """Return the error for the arguments of 2 tokens of which some are changed."""
    with pytest.raises(ValueError) as caught:
        Case(2).run([0, 1], **changed)
    return str(caught.value)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="head_dim: got 15"):
        rope_table(15, num_positions=4, base=1e4)
    cache = torch.zeros(4, 3, NUM_KV_HEADS, HEAD_DIM)
    assert "qkv: got shape [2, 127], expected [any, 128]" in refusal(qkv=torch.zeros(2, 127))
    assert "qkv: got strides" in refusal(qkv=torch.zeros(128, 2).t())
    assert "k_weight: got shape [8], expected [16]" in refusal(k_weight=torch.ones(8))
    assert "rope: got dtype torch.float64" in refusal(rope=ROPE.double())
    assert "positions: got shape [1], expected [2]" in refusal(positions=torch.tensor([0]))
    assert "slot_mapping: got dtype" in refusal(slot_mapping=torch.tensor([0, 1]).int())
    assert "v_cache: got shape [4, 3, 2, 16], expected [3, 4, 2, 16]" in refusal(
        kv_cache=KVCache(Case(2).k_cache, cache)
    )
    turned = cache.transpose(0, 1)
    assert "k_cache: got strides" in refusal(kv_cache=KVCache(turned, torch.zeros_like(turned)))
    scales = torch.zeros(4, NUM_KV_HEADS, 3), torch.zeros(4, 3, NUM_KV_HEADS)
    assert "k_cache: got dtype torch.float32, expected [torch.float8" in refusal(
        kv_cache=KVCache(cache, cache, scales)
    )
    cache = cache.to(FP8)
    assert "k_cache: got dtype torch.float8" in refusal(kv_cache=KVCache(cache, cache))
    assert "v_scale: got shape [4, 3, 2], expected [4, 2, 3]" in refusal(
        kv_cache=KVCache(cache, cache, scales)
    )
