"""Attention with fixed splits: right, and with the same bits in every batch and chunk."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.backends import attend
from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from tests.kernels.conftest import in_8_bits, numbers_of, on, on_gpu, paged_cache
from tests.search import in_long

fixed = pytest.importorskip("penstock.kernels.deterministic.triton_attention")
LENGTHS = [90, 1, 17, 33, 50]
"""of a sequence whose rows are compared, and of the others"""
HEADS = 4, 2, 32


class Sequences:
    """Queries and a paged cache of random sequences; NaN wherever no token of theirs lies."""

    def __init__(self, device: str, dtype: torch.dtype, block_size: int, is_fp8: bool) -> None:
        num_heads, num_kv_heads, head_dim = HEADS
        self.device, self.scale = device, head_dim**-0.5
        cache, table = paged_cache(LENGTHS, block_size, num_kv_heads, head_dim)
        cache *= torch.exp(torch.randn(cache.shape[:3]))[..., None, None]
        kv_cache = KVCache(*cache.to(dtype))
        self.kv_cache = on(device, in_8_bits(kv_cache) if is_fp8 else kv_cache)
        self.table, self.block_size = table.to(device), block_size
        self.queries = [
            2 * torch.randn(n, num_heads, head_dim, device=device).to(dtype) for n in LENGTHS
        ]

    def decode(self, rows: list[tuple[int, int]], **sizes: int) -> Tensor:
        """Attend some (sequence, length), one token of each."""
        attention = fixed.FixedSplitDecode(
            len(rows), *HEADS, self.block_size, self.device,
            is_fp8=self.kv_cache.scales is not None, capacity=sizes.get("capacity", 0),
        )  # fmt: skip
        attention._num_sms = sizes.get("num_sms", 1)
        attention.items = attention.items.new_full((256, 8), -1)
        q = torch.stack([self.queries[row][length - 1] for row, length in rows])
        lengths = torch.tensor([length for _, length in rows], device=self.device).int()
        out = torch.full_like(q, torch.nan)
        attention.plan(lengths)
        attention(
            q,
            self.kv_cache,
            context_lens=lengths,
            block_tables=self.table[[row for row, _ in rows]],
            scale=self.scale,
            out=out,
        )
        return out

    def prefill(self, chunks: list[tuple[int, int, int]], tile_size: int) -> list[Tensor]:
        """Attend chunks: (sequence, first, end)."""
        counts = [0, *(end - first for _, first, end in chunks)]
        tiles = [
            (row, first)
            for row, count in enumerate(counts[1:])
            for first in range(0, count, tile_size)
        ]
        ends = torch.tensor([end for *_, end in chunks], device=self.device).int()
        cu_seqlens = torch.tensor(counts, device=self.device).cumsum(0).int()
        none = torch.empty(0)
        batch = ForwardBatch(
            BatchShape(len(chunks), sum(counts), 0, len(tiles), tile_size, max(counts), 0),
            *(none, none, none),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=none,
            context_lens=ends,
            decode_lens=none,
            tiles=torch.tensor(tiles, device=self.device).int(),
            block_tables=self.table[[row for row, *_ in chunks]],
        )
        q = torch.cat([self.queries[row][first:end] for row, first, end in chunks])
        out = torch.full_like(q, torch.nan)
        fixed.fixed_split_prefill(q, self.kv_cache, batch, self.scale, out)
        return list(out.split(counts[1:]))

    def expected(self, row: int) -> Tensor:
        length = LENGTHS[row]
        return attend(
            self.queries[row].cpu().float(),
            numbers_of(self.kv_cache),
            cu_seqlens_q=torch.tensor([0, length]).int(),
            max_seqlen_q=length,
            context_lens=torch.tensor([length]).int(),
            block_tables=self.table[row, None].cpu(),
            scale=self.scale,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "is_fp8"), [(32, False), in_long(8, True), on_gpu(24, False), on_gpu(32, True)]
)
@pytest.mark.usefixtures("tensor_cores")
def test_a_row_has_the_same_bits_in_every_batch_and_chunk(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    block_size: int,
    is_fp8: bool,
) -> None:
    monkeypatch.setattr(fixed, "keys_of_tile", lambda *_: 16)
    monkeypatch.setattr(fixed, "SPLIT", 32)
    sequences = Sequences(device, dtype, block_size, is_fp8)
    (whole,) = sequences.prefill([(0, 0, 90)], 16)
    expected = sequences.expected(0)
    error = (whole.cpu().float() - expected).norm() / expected.norm()
    assert error < (2e-2 if device == "cuda" else 2e-3 if is_fp8 else 1e-5)
    chunks = [(4, 0, 50), (0, 0, 37), (1, 0, 1)], [(0, 37, 70), (3, 0, 33)], [(0, 70, 90)]
    parts = [sequences.prefill(some, 32) for some in chunks]
    assert torch.equal(torch.cat([parts[0][1], parts[1][0], parts[2][0]]), whole)
    others = [(row, length) for row, length in enumerate(LENGTHS) if row]
    for length in (1, 32, 33, 90):
        row = (0, length)
        for rows, sizes in (
            ([row], {}),
            ([row], {"num_sms": 8}),
            ([*others, row], {"num_sms": 40, "capacity": 3 if length == 33 else 0}),
        ):
            out = sequences.decode(rows, **sizes)[rows.index(row)]
            assert torch.equal(out, whole[length - 1]), (length, rows, sizes)
