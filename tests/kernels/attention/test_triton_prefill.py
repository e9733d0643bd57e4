"""Attention of prefill chunks, against the torch reference."""

import heapq
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.attention.backends import attend
from penstock.kernels.device import Device
from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from tests.kernels.conftest import by_turns, in_8_bits, numbers_of, on, on_gpu, paged_cache
from tests.search import in_long, scaled

gpu = pytest.importorskip("penstock.kernels.attention.triton_prefill")

MIXED = [(70, 70), (1, 200), (130, 300), (1, 1), (5, 64), (3, 257)]
"""(tokens in the step, context length) of each sequence"""
LONG = [(9, 1300), (70, 1100), (2, 513), (40, 40), (1, 2100)]
SHORT = [(64, 128), (1, 63), (9, 65), (33, 33)]
NUM_DECODE_ROWS = 3


class Case(NamedTuple):
    """A step with decode rows in front; NaN wherever no token of a sequence lies."""

    q: Tensor
    kv_cache: KVCache
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor

    def run(self, device: str, tile_size: int = 64, tuning: object = None) -> Tensor:
        """Return the kernel's output, which was NaN before."""
        out = torch.full_like(self.q, torch.nan, device=device)
        gpu.prefill_attention(
            self.q.to(device),
            on(device, self.kv_cache),
            tiles=self.tiles(tile_size).to(device),
            tile_size=tile_size,
            cu_seqlens_q=self.cu_seqlens_q.to(device),
            context_lens=self.context_lens.to(device),
            block_tables=self.block_tables.to(device),
            scale=self.scale,
            out=out,
            tuning=tuning,
        )
        return out.cpu()

    def run_items(self, device: str, tile_size: int, attention: Any) -> Tensor:
        """Return the output of a `PrefillAttention`."""
        out = torch.full_like(self.q, torch.nan, device=device)
        batch = self.batch(device, tile_size)
        attention.plan(batch)
        attention(self.q.to(device), on(device, self.kv_cache), batch, self.scale, out)
        return out.cpu()

    def batch(self, device: str, tile_size: int) -> ForwardBatch:
        """Return the step as far as attention reads it; a tile of an earlier step follows."""
        tiles = torch.cat((self.tiles(tile_size), torch.zeros(1, 2).int())).to(device)[:-1]
        num_rows, most = len(self.context_lens), int(self.context_lens.max())
        shape = BatchShape(num_rows, len(self.q), 0, len(tiles), tile_size, most, most)
        names = "cu_seqlens_q", "context_lens", "block_tables"
        used = {name: getattr(self, name).to(device) for name in names}
        others = dict.fromkeys(ForwardBatch._fields[1:-1], tiles)
        return ForwardBatch(shape, **(others | used | {"tiles": tiles}))

    def tiles(self, tile_size: int) -> Tensor:
        """In any order, some of them padding."""
        counts = self.cu_seqlens_q.diff().tolist()
        tiles = [
            (n, first) for n, count in enumerate(counts) for first in range(0, count, tile_size)
        ]
        tiles += [(-1, -1)] * 3
        return torch.tensor(tiles)[torch.randperm(len(tiles))].int()

    def expected(self) -> Tensor:
        """Return the reference's rows after the decode rows."""
        return attend(
            self.q[NUM_DECODE_ROWS:].float(),
            numbers_of(self.kv_cache),
            cu_seqlens_q=self.cu_seqlens_q - NUM_DECODE_ROWS,
            max_seqlen_q=int(self.cu_seqlens_q.diff().max()),
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            scale=self.scale,
        )

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def random_case(
    parts: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> Case:
    num_heads, num_kv_heads = heads
    lengths, context_lens = map(list, zip(*parts, strict=True))
    cache, table = paged_cache(context_lens, block_size, num_kv_heads, head_dim)
    q = torch.randn(NUM_DECODE_ROWS + sum(lengths), num_heads, head_dim) * 2
    return Case(
        q.to(dtype),
        KVCache(*cache.to(dtype)),
        torch.tensor([NUM_DECODE_ROWS, *lengths]).cumsum(0).int(),
        torch.tensor(context_lens).int(),
        table,
    )


def assert_right(case: Case, out: Tensor) -> None:
    expected = case.expected()
    limit = 1e-5 if out.dtype == torch.float32 else 1e-2
    assert out[:NUM_DECODE_ROWS].isnan().all()
    difference = out[NUM_DECODE_ROWS:].float() - expected
    assert difference.norm() < limit * expected.norm()
    by_token = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert (by_token < 3 * limit).all()  # a short sequence weighs little in the whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "heads", "head_dim", "block_size"),
    [
        on_gpu(MIXED, (2, 2), 128, 256),
        in_long(MIXED, (4, 2), 128, 16),
        on_gpu(MIXED, (4, 1), 64, 64),
        (MIXED, (2, 1), 64, 48),
        (SHORT, (5, 1), 128, 64),
        in_long(SHORT, (8, 1), 64, 48),
        in_long(SHORT, (4, 4), 64, 256),
    ],
)
def test_equals_the_reference(
    parts: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    case = random_case(parts, heads, head_dim, block_size, dtype)
    assert_right(case, case.run(device))


@pytest.mark.slow
@by_turns(
    "parts, heads, head_dim, block_size, tile_size",
    (SHORT, (4, 1), 32, 48, 64),
    ([(40, 290), (130, 131)], (2, 2), 16, 16, 128),
    in_long(SHORT, (4, 2), 64, 64, 64),
    on_gpu(MIXED, (16, 8), 128, 128, 64),
    on_gpu(MIXED, (32, 8), 128, 128, 128),
    on_gpu([(1300, 2700), (2000, 2000)], (16, 8), 128, 128, 128),
    on_gpu(MIXED, (16, 8), 128, 48, 128),
)
@pytest.mark.usefixtures("e4m3")
def test_8_bits(
    parts: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    tile_size: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    case = random_case(parts, heads, head_dim, block_size, dtype)
    case = case._replace(kv_cache=in_8_bits(case.kv_cache))
    assert_right(case, case.run(device, tile_size))


@pytest.mark.slow
@pytest.mark.usefixtures("e4m3")
@by_turns(
    "heads, head_dim, block_size, is_fp8, num_programs, tile_size",
    ((2, 1), 64, 64, False, 40, 64),
    ((2, 2), 32, 48, True, 30, 64),
    ((1, 1), 64, 16, False, 40, 128),
    ((4, 4), 32, 16, False, 1, 64),
    in_long((4, 2), 64, 64, False, 100, 64),
    on_gpu((32, 8), 128, 128, False, 0, 64),
    on_gpu((32, 8), 128, 128, False, 2000, 128),
    on_gpu((24, 4), 256, 128, False, 0, 128),
    on_gpu((32, 8), 128, 128, True, 1000, 64),
)
def test_items_of_tiles(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    is_fp8: bool,
    num_programs: int,
    tile_size: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    case = random_case(LONG, heads, head_dim, block_size, dtype)
    if is_fp8:
        case = case._replace(kv_cache=in_8_bits(case.kv_cache))
    attention = gpu.PrefillAttention(
        heads[0], head_dim, block_size, device, is_fp8=is_fp8, num_programs=num_programs
    )
    attention._sums.fill_(torch.nan)
    for _ in range(2):  # the first launch leaves the memory as the second needs it
        assert_right(case, case.run_items(device, tile_size, attention))
    assert not attention._arrived.any()
    assert attention._sums.isfinite().any() == (num_programs != 1)  # they were used


@pytest.mark.slow
@settings(max_examples=scaled(40), deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from([0, 0, 63, 500, 3000, 60_000])),
        min_size=1,
        max_size=12,
    ),
    num_programs=st.sampled_from([1, 7, 64, 100, 396]),
    tile_size=st.sampled_from([64, 128]),
    num_heads=st.sampled_from([1, 5, 32]),
)
@example(parts=[(1, 0)], num_programs=100, tile_size=64, num_heads=1)  # most items are unused
@example(  # one tile is cut, into the shortest items
    parts=[(1, 3200)] + [(1, 2900)] * 42, num_programs=7, tile_size=64, num_heads=1
)
@example(  # 321 tiles of keys for 20 items: 19 of 17 tiles have all
    parts=[(1, 10_280)], num_programs=20, tile_size=64, num_heads=1
)
def test_items_share_all_keys_of_all_tiles(
    parts: list[tuple[int, int]], num_programs: int, tile_size: int, num_heads: int
) -> None:
    """And take no longer than whole tiles, if programs start in the order of the items."""
    parts = [(count, before + count) for count, before in parts]
    case = random_case(parts, (1, 1), 16, 128, torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = gpu.PrefillAttention(num_heads, 16, 128, device, num_programs=num_programs)
    attention._items.zero_()  # as an earlier step leaves items
    attention.plan(batch := case.batch(device, tile_size))
    items = attention._items_of(batch.shape.num_tiles, tile_size)
    assert not items.items[items.number :].any()
    rows = [Item(*row) for row in items.items[: items.number].tolist() if row[0] >= 0]
    key_tile = gpu.default_tuning(tile_size, 128, 16).block_n
    found: dict[tuple[int, int, int, int], list[Item]] = {}
    for item in rows:
        found.setdefault(item[:4], []).append(item)
    expected = {}
    for row, (count, length) in enumerate(parts):
        for first in range(0, count, tile_size):
            token = int(case.cu_seqlens_q[row]) + first
            number, position = min(tile_size, count - first), length - count + first
            expected[row, token, number, position] = (position + 1) // key_tile * key_tile
    assert found.keys() == expected.keys()
    used: set[int] = set()
    for tile, several in found.items():
        several.sort(key=lambda item: item.first_key)
        keys = [0, *(item.last_key for item in several)]
        assert [item.first_key for item in several] == keys[:-1]
        assert keys[-1] == expected[tile]
        assert [item.split for item in several] == list(range(len(several)))
        assert {item.num_splits for item in several} == {len(several)}
        if len(several) > 1:
            assert min(item.last_key - item.first_key for item in several) > 0
            places = set(range(several[0].place, several[0].place + len(several)))
            assert not places & used
            used |= places
    assert max(used, default=-1) < 2 * attention._num_more(tile_size)
    whole = sorted(expected.values(), reverse=True)
    cut = [item.last_key - item.first_key for item in rows]
    slack = gpu.OVERHEAD.value + gpu.MERGE.value
    times = (makespan(keys, num_heads, num_programs) for keys in (cut, whole))
    assert next(times) <= next(times) + slack


@pytest.mark.parametrize(
    ("parts", "num_heads", "num_programs", "num_splits"),
    [
        ([(1, 10_281)], 1, 20, 19),
        ([(1, 10_281)], 2, 40, 19),
        ([(1, 3201), *[(1, 2901)] * 42], 1, 7, 2),
    ],
)
def test_items_fill_waves_of_programs(
    parts: list[tuple[int, int]],
    num_heads: int,
    num_programs: int,
    num_splits: int,
    device: str,
    dtype: torch.dtype,
) -> None:
    """With longer or shorter ones, the last programs would begin after others have ended."""
    case = random_case(parts, (1, 1), 16, 16, dtype)
    attention = gpu.PrefillAttention(num_heads, 16, 16, device, num_programs=num_programs)
    attention._items.zero_()
    attention.plan(case.batch(device, 64))
    assert attention._items[:, 7].max() == num_splits


def test_a_size_of_tiles_has_its_own_number_of_programs(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gpu, "this_device", lambda: Device(num_sms=8))
    case = random_case([(1, 1)], (1, 1), 16, 16, dtype)
    case = case._replace(context_lens=torch.tensor([24_000]).int())
    attention = gpu.PrefillAttention(1, 16, 16, device)
    for tile_size, num_programs in ((64, 24), (128, 8)):
        attention.plan(case.batch(device, tile_size))
        assert attention._items[0, 7] == num_programs


@pytest.mark.parametrize("num_programs", [0, 100])
def test_memory_suffices_for_items_of_both_sizes(num_programs: int) -> None:
    """The kernel checks no bounds."""
    attention = gpu.PrefillAttention(4, 16, 16, "cpu", num_programs=num_programs)
    for tile_size in (64, 128):
        items = attention._items_of(gpu.MAX_TILES, tile_size)
        num_results = 2 * attention._num_more(tile_size) * 4
        assert items.number <= len(items.items)
        assert num_results <= len(items.arrived)
        assert num_results * tile_size <= len(items.lses) == len(items.sums) // 16


def test_a_step_with_more_tiles_than_are_cut(device: str, dtype: torch.dtype) -> None:
    """One more; three are padding."""
    case = random_case([(2, 2)] * (gpu.MAX_TILES - 2), (1, 1), 16, 16, dtype)
    attention = gpu.PrefillAttention(1, 16, 16, device, num_programs=8)
    assert_right(case, case.run_items(device, 64, attention))


def test_only_the_last_item_of_a_tile_writes_its_result(device: str, dtype: torch.dtype) -> None:
    """Programs run at the same time: those of other tiles and heads have other places."""
    case = random_case([(1, 1100), (1, 1100)], (2, 1), 16, 16, dtype)
    attention = gpu.PrefillAttention(2, 16, 16, device, num_programs=16)
    attention._items.fill_(-1)
    attention.plan(batch := case.batch(device, 64))
    items = attention._items
    places, numbers = items[items[:, 8] == 0][:, 6:8].long().T  # of the two tiles
    assert min(numbers) > 1
    items[items[:, 8] == 0, 0] = -1  # as if these had not run yet
    out = torch.full_like(case.q, torch.nan, device=device)
    attention(case.q.to(device), on(device, case.kv_cache), batch, case.scale, out)
    assert out.isnan().all()
    arrived = torch.zeros_like(attention._arrived)
    arrived.view(-1, 2)[places] = (numbers - 1).int()[:, None]
    assert (attention._arrived == arrived).all()


def test_items_have_the_tiles_of_keys_of_this_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype
) -> None:
    """Here the tiles depend on the width of heads and on the type of keys."""
    ada = Device((8, 9), 99 << 10, 84)
    monkeypatch.setattr(gpu, "this_device", lambda: ada)
    assert len({gpu.default_tuning(128, 16, *wide).block_n for wide in ((), (256,))}) == 2
    case = random_case([(5, 52)], (1, 1), 256, 16, dtype)
    case = case._replace(kv_cache=in_8_bits(case.kv_cache))
    attention = gpu.PrefillAttention(1, 256, 16, device, is_fp8=True, num_programs=8)
    assert_right(case, case.run_items(device, 128, attention))


class Item(NamedTuple):
    """A row of `Items.items`."""

    row: int
    token: int
    count: int
    position: int
    first_key: int
    last_key: int
    place: int
    num_splits: int
    split: int


def makespan(keys: list[int], num_heads: int, num_programs: int) -> int:
    """Return the keys of the program that ends last; programs start in this order."""
    ends = [0] * num_programs
    for number in keys:
        for _ in range(num_heads):
            heapq.heapreplace(ends, ends[0] + number + gpu.OVERHEAD.value)
    return max(ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile_size", "tuning", "block_size"),
    [
        (128, (64, 4, 3), 16),
        *(in_long(64, (128, 4, 2), 256), in_long(128, None, 256), in_long(16, (32, 4, 2), 16)),
        *(on_gpu(64, (128, 4, 2), 16), on_gpu(128, (64, 4, 3), 256), on_gpu(128, None, 16)),
    ],
)
def test_a_tuning_changes_no_result(
    tile_size: int, tuning: tuple[int, ...] | None, block_size: int, device: str, dtype: torch.dtype
) -> None:
    if device == "cuda" and tile_size < 64:
        pytest.skip("tiles as small as this are for the interpreter")
    case = random_case([(40, 290), (130, 131)], (2, 1), 64, block_size, dtype)
    assert_right(case, case.run(device, tile_size, tuning and gpu.PrefillTuning(*tuning)))


@pytest.mark.parametrize("queries", [63, 64, 129, on_gpu(65), on_gpu(127), on_gpu(128)])
def test_the_ends_of_tiles(queries: int, device: str, dtype: torch.dtype) -> None:
    parts = [(queries, queries + before) for before in (0, 1, 63, 64, 127)]
    case = random_case(parts, (1, 1), 64, 64, dtype)
    assert_right(case, case.run(device))


def test_large_scores_stay_finite(device: str, dtype: torch.dtype) -> None:
    case = random_case([(20, 150)], (2, 1), 64, 64, dtype)
    case = case._replace(q=case.q * 1000)
    assert case.run(device)[NUM_DECODE_ROWS:].isfinite().all()
    case = random_case([(20, 1100)], (1, 1), 16, 16, dtype)
    case = case._replace(q=case.q * 1000)
    attention = gpu.PrefillAttention(1, 16, 16, device, num_programs=8)
    assert case.run_items(device, 64, attention)[NUM_DECODE_ROWS:].isfinite().all()


def test_no_tokens(device: str, dtype: torch.dtype) -> None:
    case = random_case([(1, 1)], (1, 1), 64, 16, dtype)
    case = case._replace(cu_seqlens_q=torch.tensor([3, 3]).int())
    assert case.run(device).isnan().all()


def test_refuses_an_odd_head_dim(device: str, dtype: torch.dtype) -> None:
    case = random_case([(1, 1)], (1, 1), 48, 16, dtype)
    with pytest.raises(ValueError, match="head_dim: got 48, expected a power of 2, 16 or more"):
        case.run(device)
