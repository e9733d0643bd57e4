"""Paged decode attention on the GPU, against the reference."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.backends import attend
from penstock.kernels.layouts.kv_cache import KVCache

pytest.importorskip("triton")
from penstock.kernels.attention.triton_decode import DecodeAttention, DecodeTuning, merged_splits
from tests.kernels.conftest import by_turns, in_8_bits, numbers_of, on_gpu, paged_cache
from tests.search import in_long

LENGTHS = [200, 1, 0, 65, 15, 16, 0, 63, 17, 64, 0]
"""with padded rows in the middle and at the end"""
FEW_SPLITS = DecodeTuning(programs_per_sm=1)
MANY_SPLITS = DecodeTuning(block_n=32, programs_per_sm=40, min_split=32)


class Layout(NamedTuple):
    """Sizes of heads and of the cache."""

    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    block_size: int = 16


class Step:
    """One layer's attention for rows of random tokens.

    Slots that belong to no token of a row hold 1e4, and blocks lie in a random order.
    """

    def __init__(
        self,
        layout: Layout,
        lengths: list[int],
        device: str,
        dtype: torch.dtype,
        gap: int = 0,
        *,
        fp8: bool = False,
    ) -> None:
        num_heads, num_kv_heads, head_dim, block_size = layout
        cache, table = paged_cache(lengths, block_size, num_kv_heads, head_dim, void=1e4)
        wide = torch.randn(len(lengths), num_heads * head_dim + gap).to(device, dtype)
        self.q = wide[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
        self.k_cache, self.v_cache = cache.to(device, dtype)
        self.fp8 = fp8
        self.block_tables = table.to(device)
        self.context_lens = torch.tensor(lengths).int().to(device)
        self.scale = head_dim**-0.5

    def run(self, attention: DecodeAttention) -> Tensor:
        """Return the result, NaN where nothing was written."""
        attention.plan(self.context_lens)
        # also the plain kernel that must lie between a plan and a layer
        out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        self.call(attention, out)
        return out

    @property
    def kv_cache(self) -> KVCache:
        kv_cache = KVCache(self.k_cache, self.v_cache)
        return in_8_bits(kv_cache) if self.fp8 else kv_cache

    def call(self, attention: DecodeAttention, out: Tensor) -> None:
        attention(
            self.q,
            self.kv_cache,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            scale=self.scale,
            out=out,
        )

    def expected(self) -> Tensor:
        """Return the reference's result for the rows that are not padded, float32."""
        rows = self.context_lens.cpu().nonzero()[:, 0]
        return attend(
            self.q.cpu().float()[rows],
            numbers_of(self.kv_cache),
            cu_seqlens_q=torch.arange(len(rows) + 1).int(),
            max_seqlen_q=1,
            context_lens=self.context_lens.cpu()[rows],
            block_tables=self.block_tables.cpu()[rows],
            scale=self.scale,
        )

    def check(self, out: Tensor) -> None:
        """Every row is right, and no padded row was written."""
        padded = (self.context_lens == 0).cpu()
        out, tolerance = out.cpu(), 1e-5 if out.dtype == torch.float32 else 1e-2
        assert out[padded].isnan().all()
        if not padded.all():
            expected = self.expected()
            error = (out[~padded].float() - expected).flatten(1).norm(dim=1)
            assert (error / expected.flatten(1).norm(dim=1)).max() < tolerance


def attention_for(
    layout: Layout, device: str, tuning: DecodeTuning | None = None, max_rows: int = 16
) -> DecodeAttention:
    return DecodeAttention(max_rows, *layout, device, tuning=tuning)


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads",
    [(40, 8), *map(in_long, [(16, 8), (2, 2), (16, 1)]), *map(on_gpu, [(32, 8), (16, 2), (4, 1)])],
)
def test_head_layouts(heads: tuple[int, int], device: str, dtype: torch.dtype) -> None:
    layout = Layout(*heads, head_dim=128)
    step = Step(layout, [66, 0, 5], device, dtype)
    step.check(step.run(attention_for(layout, device, MANY_SPLITS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "tuning"),
    [
        *((16, FEW_SPLITS), (48, MANY_SPLITS)),
        *(in_long(16, MANY_SPLITS), in_long(256, FEW_SPLITS)),
        *(on_gpu(48, FEW_SPLITS), on_gpu(256, MANY_SPLITS)),
        *(on_gpu(64, FEW_SPLITS), on_gpu(64, MANY_SPLITS)),
    ],
)
def test_block_sizes_and_lengths(
    block_size: int, tuning: DecodeTuning, device: str, dtype: torch.dtype
) -> None:
    layout = Layout(block_size=block_size)
    step = Step(layout, LENGTHS, device, dtype)
    step.check(step.run(attention_for(layout, device, tuning)))


@pytest.mark.slow
@by_turns(
    "layout, tuning",
    (Layout(4, 2, 32, 64), MANY_SPLITS),
    (Layout(2, 2, 16, 16), FEW_SPLITS),
    in_long(Layout(10, 2, 64, 48), MANY_SPLITS),
    on_gpu(Layout(16, 8, 128, 128), None),
    on_gpu(Layout(32, 8, 128, 128), None),
    on_gpu(Layout(16, 2, 128, 16), None),
    on_gpu(Layout(16, 8, 128, 128), MANY_SPLITS),
)
@pytest.mark.usefixtures("e4m3")
def test_8_bits(
    layout: Layout, tuning: DecodeTuning | None, device: str, dtype: torch.dtype
) -> None:
    lengths = LENGTHS if device == "cpu" else [700, 1400, *LENGTHS] * 20
    step = Step(layout, lengths, device, dtype, fp8=True)
    step.check(step.run(attention_for(layout, device, tuning, max_rows=len(lengths))))


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [in_long(FEW_SPLITS), MANY_SPLITS])
def test_lengths_change_between_steps(
    tuning: DecodeTuning, device: str, dtype: torch.dtype
) -> None:
    """Each step finds the counters at 0, and no item of the step before."""
    layout = Layout(4, 2)
    attention = attention_for(layout, device, tuning)
    for lengths in ([130, 3, 70], [1, 100], [0, 0], [7], [40] * 4, [70, 90]):
        step = Step(layout, lengths, device, dtype)
        step.check(step.run(attention))


@pytest.mark.slow
def test_layers_share_a_plan(device: str, dtype: torch.dtype) -> None:
    """And give the same bits for the same data."""
    layout = Layout(4, 2)
    attention = attention_for(layout, device, MANY_SPLITS)
    steps = [Step(layout, [100, 0, 33], device, dtype) for _ in range(2)]
    attention.plan(steps[0].context_lens)
    outs = [torch.full_like(step.q, torch.nan) for step in (*steps, steps[0])]
    for step, out in zip((*steps, steps[0]), outs, strict=True):
        step.call(attention, out)
        step.check(out)
    assert torch.equal(outs[0].nan_to_num(7), outs[2].nan_to_num(7))


def test_rows_of_queries_may_lie_apart(device: str, dtype: torch.dtype) -> None:
    step = Step(Layout(), [40, 0, 70], device, dtype, gap=96)
    assert not step.q.is_contiguous()
    step.check(step.run(attention_for(Layout(), device)))


def test_rows_of_tables_may_lie_apart(device: str, dtype: torch.dtype) -> None:
    step = Step(Layout(), [40, 0, 70], device, dtype)
    wide = step.block_tables.repeat(1, 2)
    step.block_tables = wide[:, : step.block_tables.shape[1]]
    step.check(step.run(attention_for(Layout(), device)))


def test_large_scores_and_large_values(device: str, dtype: torch.dtype) -> None:
    """Splits whose weights differ by more than float32 holds."""
    step = Step(Layout(), [150, 150], device, dtype)
    step.k_cache *= 40
    step.scale = 1.0
    step.check(step.run(attention_for(Layout(), device, MANY_SPLITS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads", [(10, 2), *map(in_long, [(2, 1), (16, 1)]), *map(on_gpu, [(4, 1), (16, 2)])]
)
def test_many_splits_are_merged_in_turns(
    heads: tuple[int, int], device: str, dtype: torch.dtype
) -> None:
    """The last turn not full; the largest weights anywhere among the splits."""
    layout = Layout(*heads, head_dim=128)
    per_turn = merged_splits(heads[0] // heads[1], layout.head_dim)
    length = 16 * (2 * per_turn + 1) - 3
    step = Step(layout, [length, 0, 5], device, dtype)
    step.k_cache *= 40
    step.scale = 1.0
    attention = attention_for(layout, device, DecodeTuning(16, programs_per_sm=80, min_split=16))
    step.check(step.run(attention))
    assert (attention.items[:, 0] == 0).sum() == 2 * per_turn + 1


@pytest.mark.parametrize("num_rows", [1, 9, 100, on_gpu(2), on_gpu(3), on_gpu(33)])
def test_a_plan_covers_every_key_once(num_rows: int, device: str) -> None:
    lengths = torch.randint(0, 1500, (num_rows,)).int()
    lengths[torch.rand(num_rows) < 0.2] = 0
    attention = attention_for(Layout(), device, DecodeTuning(programs_per_sm=80), max_rows=100)
    for _ in range(2):
        attention.plan(lengths.to(device))
    size = attention.max_items(num_rows)
    items = attention.items[:size].cpu()[:, :5]
    used = items[items[:, 0] >= 0]
    assert (items[: len(used), 0] >= 0).all()
    covered = torch.zeros(num_rows, 1501, dtype=torch.int32)
    for i, (row, begin, end, first, num_splits) in enumerate(used.tolist()):
        assert 0 <= begin < end
        assert first <= i < first + num_splits
        assert (used[first : first + num_splits, 0] == row).all()
        assert begin % 64 == 0
        covered[row, begin:end] += 1
    assert torch.equal(covered, (torch.arange(1501) < lengths[:, None]).int())
    tiles = (used[:, 2] - used[:, 1] + 63) // 64
    longest = tiles[used[:, 1] == 0]
    assert torch.equal(longest, longest.sort(descending=True).values)


def test_a_short_batch_is_cut_into_tiles(device: str) -> None:
    attention = attention_for(Layout(), device, DecodeTuning(programs_per_sm=64), max_rows=1)
    attention.plan(torch.tensor([1000]).int().to(device))
    assert (attention.items[:, 0] == 0).sum() == 16
    tuning = DecodeTuning(programs_per_sm=64, min_split=200)
    attention = attention_for(Layout(), device, tuning, max_rows=1)
    attention.plan(torch.tensor([1000]).int().to(device))
    assert (attention.items[:, 0] == 0).sum() == 4


def test_many_rows_are_not_cut(device: str) -> None:
    attention = attention_for(Layout(), device, DecodeTuning(programs_per_sm=1), max_rows=100)
    attention.plan(torch.full((100,), 1000, dtype=torch.int32, device=device))
    assert (attention.items[:, 0] >= 0).sum() == 100


def test_refuses_what_it_can_not_do(device: str, dtype: torch.dtype) -> None:
    for arguments, sentence in (
        ((0, 8, 4, 64, 16), "max_rows: got 0"),
        ((5000, 8, 4, 64, 16), "1 to 4096"),
        ((8, 8, 3, 64, 16), "got 8 for 3 KV heads"),
        ((8, 68, 4, 64, 16), "1 to 16 for each"),
        ((8, 8, 4, 80, 16), "head_dim: got 80"),
        ((8, 8, 4, 64, 0), "block_size: got 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            DecodeAttention(*arguments, device)
    with pytest.raises(ValueError, match="block_n: got 24"):
        attention_for(Layout(), device, DecodeTuning(block_n=24))
    attention = attention_for(Layout(), device, max_rows=2)
    with pytest.raises(ValueError, match="got 3 rows, expected 1 to 2"):
        attention.plan(torch.ones(3, dtype=torch.int32, device=device))
    step = Step(Layout(), [3, 5], device, dtype)
    out = torch.empty_like(step.q)
    step.q = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="q: got strides"):
        step.call(attention, out)
    step = Step(Layout(block_size=32), [3, 5], device, dtype)
    with pytest.raises(ValueError, match="k_cache: got shape"):
        step.call(attention, torch.empty_like(step.q))
