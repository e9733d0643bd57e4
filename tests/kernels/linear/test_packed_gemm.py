"""Products with packed integers, by Triton, against what the integers stand for."""

from itertools import product

import pytest
import torch
from torch.nn import functional

from penstock.kernels.device import Device
from penstock.kernels.packed import triton_packed as packed_gemm
from penstock.kernels.packed.matrices import (
    Packed,
    num_groups,
    pack_codes,
    pack_groups,
    unpack_codes,
)
from penstock.kernels.packed.triton_packed import (
    BN,
    MAX_ROWS,
    PackedTile,
    choose,
    dequantized,
    multiply,
    packed_shared_bytes,
    step_columns,
)
from tests.kernels.conftest import on_gpu
from tests.search import diagonal


def pack(
    rows: int, columns: int, bits: int, group: int, *, zeros: bool = True, order: bool = False
) -> Packed:
    """Return a random matrix of integers; group: 0 for whole rows."""
    codes = torch.randint(1 << bits, (rows, columns), dtype=torch.uint8)
    group = group or columns
    groups = num_groups(columns, group)
    scale = (torch.rand(groups, rows) / 10 + 0.01).half() / (1 << bits - 3)
    points = torch.full((groups, rows), 1 << bits - 1, dtype=torch.uint8)
    if zeros:
        points = torch.randint(1 << bits, (groups, rows), dtype=torch.uint8)
    places = torch.randperm(columns).int() if order else None
    return Packed(pack_codes(codes, bits), pack_groups(scale, points), places, columns, group)


def on(device: str, weight: Packed) -> Packed:
    """Return the same matrix there."""
    parts = (weight.words, weight.groups, weight.order)
    moved = [None if part is None else part.to(device) for part in parts]
    return Packed(*moved, weight.num_columns, weight.group_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 96, 128, 300])
def test_codes_are_unpacked_as_they_were_packed(bits: int, columns: int) -> None:
    codes = torch.randint(1 << bits, (2, 5, columns), dtype=torch.uint8)
    words = torch.stack([pack_codes(one, bits) for one in codes])
    assert words.shape == (2, -(-columns // 128), 5, 4 * bits)
    assert torch.equal(unpack_codes(words)[..., :columns], codes)


CASES = [
    # rows, weight's rows, columns, bits, group, zero points, order
    (1, 70, 256, 4, 128, True, False),
    (5, 70, 256, 4, 64, False, False),
    (3, 64, 288, 4, 32, True, False),
    (9, 130, 320, 4, 0, True, False),
    (1, 70, 256, 8, 128, False, False),
    (17, 70, 192, 8, 32, True, False),
    (4, 70, 256, 4, 128, True, True),
    (4, 70, 352, 8, 32, True, True),
    (70, 70, 128, 4, 128, True, False),
]
LARGE_CASES = [
    (64, 4096, 4096, 4, 128, True, False),
    (128, 2560, 9728, 4, 128, True, False),
    (33, 2048, 6144, 8, 128, False, False),
]
KINDS = ["add", "norm", "swiglu"]


@pytest.mark.parametrize(
    ("kind", "case"),
    [*diagonal(KINDS, CASES), *(on_gpu(*case) for case in product(KINDS, LARGE_CASES))],
)
def test_equals_the_product_with_what_it_stands_for(
    kind: str, case: tuple[int, int, int, int, int, bool, bool], device: str
) -> None:
    """In float16, which the interpreter computes too; on a GPU in bfloat16 as well."""
    num_rows, num_weights, columns, bits, group, zeros, order = case
    weight = pack(num_weights, columns, bits, group, zeros=zeros, order=order)
    for dtype in (torch.float16, torch.bfloat16)[: 1 + (device == "cuda")]:
        x = torch.randn(num_rows, columns).to(dtype)
        norm = (torch.rand(columns) + 0.5).to(dtype) if kind != "add" else None
        residual = torch.randn(num_rows, num_weights).to(dtype) if kind == "add" else None
        normed = x.float()
        if norm is not None:
            normed = functional.rms_norm(normed, (columns,), eps=1e-6).to(dtype) * norm
        exact = normed.float() @ weight.dequantized().t()
        if kind == "swiglu":
            gate, up = exact.chunk(2, 1)
            exact = functional.silu(gate) * up
        if residual is not None:
            exact += residual.float()
        there = [None if one is None else one.to(device) for one in (x, norm, residual)]
        found = multiply(kind, there[0], on(device, weight), there[1], 1e-6, there[2])  # type: ignore[arg-type]
        assert found is not None
        error = (found.cpu().float() - exact).norm() / exact.norm()
        assert error < (2e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize("split_k", [1, 2, 3])
def test_a_split_of_the_inner_dimension_adds_up(split_k: int, device: str) -> None:
    weight = pack(128, 640, 4, 128)
    x = torch.randn(3, 640).half()
    residual = torch.randn(3, 128).half()
    exact = x.float() @ weight.dequantized().t() + residual.float()
    tile = PackedTile(8, 128, split_k, 3, 4)
    on_device = x.to(device), on(device, weight), None, 0.0, residual.to(device), None
    found = multiply("add", *on_device, tile)
    assert found is not None
    torch.testing.assert_close(found.cpu().float(), exact, atol=0.05, rtol=2e-3)
    if split_k > 1 and device == "cpu":
        assert not packed_gemm.workspace(torch.device(device))[1].any()


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "order"),
    [(4, 128, True, False), (4, 32, False, True), (8, 0, True, False), (8, 64, False, True)],
)
def test_dequantized_rounds_once(
    bits: int, group: int, zeros: bool, order: bool, device: str
) -> None:
    weight = pack(70, 320, bits, group, zeros=zeros, order=order)
    found = dequantized(on(device, weight), torch.float16)
    assert torch.equal(found.cpu(), weight.dequantized().half())


def test_many_rows_and_float32_go_to_cublas() -> None:
    weight = pack(64, 128, 4, 128)
    assert choose("add", MAX_ROWS + 1, weight) is None
    assert choose("add", 0, weight) is None
    assert multiply("add", torch.randn(1, 128), weight) is None
    assert multiply("logits", torch.randn(1, 128).half(), weight) is None


@pytest.mark.parametrize("shared", [99, 163, 227])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_every_choice_fits(shared: int, group: int) -> None:
    device = Device((8, 9), shared << 10, 84)
    for bits in (4, 8):
        weight = pack(512, 2048, bits, group)
        for kind in ("add", "norm", "swiglu"):
            for rows in (1, 8, 9, 64, 65, MAX_ROWS):
                tile = choose(kind, rows, weight, device)
                assert tile is not None
                number = 2 if kind == "swiglu" else 1
                assert packed_shared_bytes(bits, number, tile) <= device.shared_bytes
                assert rows <= tile.bm or tile.split_k == 1
                bk, of_group = step_columns(weight)
                assert tile.bk == bk
                assert of_group % bk == 0
    assert BN == 64


@pytest.mark.usefixtures("tensor_cores", "deterministic")
@pytest.mark.parametrize("kind", ["add", "swiglu"])
def test_deterministic_rows_have_the_same_bits_for_every_number_of_rows(
    device: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(packed_gemm, "MIN_STEPS", 1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    weight = on(device, pack(2 * BN, 512, 4, 128))
    assert choose(kind, 1, weight).split_k == choose(kind, 700, weight).split_k == 4  # type: ignore[union-attr]
    x = torch.randn(70, 512).to(device, dtype)
    whole = multiply(kind, x, weight)
    assert whole is not None
    for rows in (1, 17, 40):
        assert torch.equal(multiply(kind, x[-rows:].contiguous(), weight), whole[-rows:])
