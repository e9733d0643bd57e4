"""Paged attention, against dense attention in float64, and bit by bit against itself."""

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.backends import attend
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.matrices import FP8
from tests.search import diagonal

HEADS = [(4, 4), (8, 4), (8, 2), (8, 1)]
"""(query heads, KV heads): groups of 1, 2, 4 and 8"""


class Sequence(NamedTuple):
    """All queries, keys and values of one sequence, [num_tokens, num_heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor


class Cache:
    """A paged cache that holds no numbers yet, and hands out its blocks in a random order."""

    def __init__(self, block_size: int, sequences: list[Sequence], *, fp8: bool = False) -> None:
        num_kv_heads, head_dim = sequences[0].k.shape[1:]
        max_blocks = max(-(-len(s.k) // block_size) for s in sequences)
        shape = (len(sequences) * max_blocks + 3, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        numbers = torch.full((2, *shape), torch.nan)
        scales = torch.full((2, shape[0], num_kv_heads, block_size), torch.nan)
        self.kv = KVCache(*numbers.to(FP8), tuple(scales)) if fp8 else KVCache(*numbers)
        order = torch.randperm(shape[0])[: len(sequences) * max_blocks]
        self.block_tables = order.view(len(sequences), max_blocks).int()
        self.sequences = sequences

    def attend(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """One step: stores and attends tokens `begin` to `end` of a sequence, for each part."""
        rows = [(self.sequences[i], range(begin, end)) for i, begin, end in parts]
        lengths = [len(tokens) for _, tokens in rows]
        tables = self.block_tables[[i for i, _, _ in parts]]
        slots = [
            table[position // self.block_size].item() * self.block_size + position % self.block_size
            for table, (_, tokens) in zip(tables, rows, strict=True)
            for position in tokens
        ]
        q, k, v = (
            torch.cat([sequence[i][tokens.start : tokens.stop] for sequence, tokens in rows])
            for i in range(3)
        )
        self.kv.store(torch.tensor(slots), k, v)
        out = attend(
            q,
            self.kv,
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
            max_seqlen_q=max(lengths),
            context_lens=torch.tensor([end for _, _, end in parts]).int(),
            block_tables=tables,
            scale=q.shape[-1] ** -0.5,
        )
        return list(out.split(lengths))


def random_sequence(
    num_tokens: int, num_heads: int = 8, num_kv_heads: int = 4, head_dim: int = 64
) -> Sequence:
    return Sequence(
        torch.randn(num_tokens, num_heads, head_dim) * 2,
        torch.randn(num_tokens, num_kv_heads, head_dim),
        torch.randn(num_tokens, num_kv_heads, head_dim),
    )


def dense_attention(sequence: Sequence) -> Tensor:
    """Return the textbook's: every score, a triangle of them masked; in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in sequence)
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[1:]).triu(1).bool()
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).float()


def in_chunks(cache: Cache, sequence: int, bounds: list[int]) -> Tensor:
    """Return the sequence's results, computed alone in one chunk after the other."""
    return torch.cat([cache.attend([(sequence, begin, end)])[0] for begin, end in pairwise(bounds)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"), diagonal(HEADS, (16, 64, 128), (1, 16, 48, 256))
)
def test_equals_dense_attention(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    lengths = (1, 5, 127, 128, 129, 300)
    sequences = [random_sequence(n, *heads, head_dim) for n in lengths]
    results = Cache(block_size, sequences).attend([(i, 0, n) for i, n in enumerate(lengths)])
    for sequence, result in zip(sequences, results, strict=True):
        torch.testing.assert_close(result, dense_attention(sequence), atol=2e-5, rtol=1e-4)


def test_a_step_mixes_prefill_chunks_and_decode() -> None:
    sequences = [random_sequence(n) for n in (300, 40, 200, 130)]
    cache = Cache(16, sequences)
    cache.attend([(0, 0, 299), (2, 0, 150), (3, 0, 65)])
    results = cache.attend([(0, 299, 300), (1, 0, 40), (2, 150, 200), (3, 65, 130)])
    for sequence, result in zip(sequences, results, strict=True):
        expected = dense_attention(sequence)[-len(result) :]
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), diagonal(HEADS, (64, 128)))
def test_chunks_change_no_bit(heads: tuple[int, int], head_dim: int) -> None:
    cache = Cache(16, [random_sequence(300, *heads, head_dim)])
    whole = in_chunks(cache, 0, [0, 300])
    for bounds in ([0, 1, 8, 100, 101, 299, 300], [0, 63, 64, 127, 129, 256, 300]):
        assert torch.equal(in_chunks(cache, 0, bounds), whole)
    assert torch.equal(in_chunks(cache, 0, list(range(301))), whole)


def test_block_size_changes_no_bit() -> None:
    sequences = [random_sequence(n) for n in (300, 77)]
    results = [
        torch.cat(Cache(block_size, sequences).attend([(0, 0, 300), (1, 0, 77)]))
        for block_size in (16, 256, 1, 48)
    ]
    for other in results[1:]:
        assert torch.equal(other, results[0])


def test_other_sequences_change_no_bit() -> None:
    lengths = [3, 128, 250, 400, 17, 129]
    cache = Cache(16, [random_sequence(n) for n in lengths])
    alone = [cache.attend([(i, 0, n)])[0] for i, n in enumerate(lengths)]
    together = cache.attend([(i, 0, n) for i, n in enumerate(lengths)])
    decoded = cache.attend([(i, n - 1, n) for i, n in enumerate(lengths)])
    for one, both, last in zip(alone, together, decoded, strict=True):
        assert torch.equal(one, both)
        assert torch.equal(one[-1:], last)


def in_8_bits(x: Tensor) -> Tensor:
    """Each head of a token [num_tokens, num_heads, head_dim] rounded, by its largest number."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(FP8).float() * scale


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_8_bits_are_multiplied_with_their_scales(block_size: int) -> None:
    sequences = [random_sequence(n) for n in (300, 77)]
    cache = Cache(block_size, sequences, fp8=True)
    results = [in_chunks(cache, 0, [0, 130, 299, 300]), in_chunks(cache, 1, [0, 77])]
    for (q, k, v), result in zip(sequences, results, strict=True):
        expected = dense_attention(Sequence(q, in_8_bits(k), in_8_bits(v)))
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-4)
        exact = dense_attention(Sequence(q, k, v))
        assert (result - exact).norm() < 0.05 * exact.norm()


def refusal(**changed: object) -> str:
    """Return the error of `attend` for arguments of which some are changed."""
    arguments = {
        "q": torch.zeros(2, 4, 8),
        "kv_cache": KVCache(*torch.zeros(2, 3, 16, 2, 8)),
        "cu_seqlens_q": torch.tensor([0, 2]).int(),
        "max_seqlen_q": 2,
        "context_lens": torch.tensor([5]).int(),
        "block_tables": torch.zeros(1, 2).int(),
        "scale": 1.0,
    }
    with pytest.raises(ValueError) as caught:
        attend(**{**arguments, **changed})  # type: ignore[arg-type]
    return str(caught.value)


def test_refuses_what_does_not_fit() -> None:
    assert "expected [any, any, any]" in refusal(q=torch.zeros(2, 32))
    assert "expected [any, any, any, 4]" in refusal(q=torch.zeros(2, 4, 4))
    assert "got 4 heads, expected a multiple of the 3 KV heads" in refusal(
        kv_cache=KVCache(*torch.zeros(2, 3, 16, 3, 8))
    )
    k_cache, turned = torch.zeros(3, 16, 2, 8), torch.zeros(2, 16, 3, 2, 8).transpose(1, 2)
    assert "v_cache: got shape [2, 16, 2, 8]" in refusal(kv_cache=KVCache(k_cache, k_cache[:2]))
    assert "k_cache: got strides" in refusal(kv_cache=KVCache(*turned))
    assert "cu_seqlens_q: got shape [1], expected [2]" in refusal(
        cu_seqlens_q=torch.tensor([0]).int()
    )
    assert "context_lens: got dtype torch.int64" in refusal(context_lens=torch.tensor([5]))
    assert "block_tables: got shape [2]" in refusal(block_tables=torch.zeros(2).int())
    assert "got 2 tokens, expected at most 1 times 1" in refusal(max_seqlen_q=1)
    assert "at most 32, the tokens that its blocks hold" in refusal(
        context_lens=torch.tensor([33]).int()
    )
    assert "got 1, expected at least 2" in refusal(context_lens=torch.tensor([1]).int())
