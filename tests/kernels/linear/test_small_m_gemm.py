"""Products of few rows, by every kernel and with everything fused, against torch in float32."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.elementwise import quantize
from penstock.kernels.linear import small_m_gemm
from penstock.kernels.linear.small_m_gemm import (
    GemmConfig,
    Product,
    choose,
    launch,
    multiply,
)
from penstock.kernels.linear.tile_sizes import Table
from penstock.kernels.linear.tuning_tables import packaged_tables
from penstock.kernels.matrices import Quantized
from tests.kernels.conftest import on_gpu, there
from tests.search import diagonal

EPS = 1e-6
KINDS = ["plain", "add", "norm", "logits", "swiglu"]
NORM_KINDS = ["norm", "logits", "swiglu"]
CONFIGS = {
    "mma": GemmConfig("mma", 16, 32, 1, 4, 3, 64),
    "wide": GemmConfig("mma", 64, 64, 1, 4, 3, 0),
    "slices": GemmConfig("slices", 32, 64, 1, 4, 3, 64),
    "whole": GemmConfig("mma", 16, 128, 1, 4, 1, 0),
    "whole slices": GemmConfig("slices", 16, 128, 1, 4, 1, 0),
}
SPLITS = {
    "mma by 2": GemmConfig("mma", 16, 16, 2, 4, 3, 64),
    "mma by 3": GemmConfig("mma", 32, 32, 3, 4, 2, 0),
    "slices by 3": GemmConfig("slices", 16, 64, 3, 4, 3, 0),
    "whole by 2": GemmConfig("slices", 16, 64, 2, 2, 1, 0),
}
GEMVS = {
    "whole": GemmConfig("gemv", 8, 256, 1, 4, 1, 0),
    "in turn": GemmConfig("gemv", 16, 64, 1, 4, 3, 64),
}


def product(kind: str, rows: int, inner: int, columns: int, dtype: torch.dtype) -> Product:
    """Return a GEMM of random numbers; its result is NaN."""
    swiglu = kind == "swiglu"
    weight = torch.randn(2 * columns if swiglu else columns, inner) / inner**0.5
    out_dtype = torch.float32 if kind == "logits" else dtype
    return Product(
        (torch.randn(rows, inner) * torch.rand(rows, 1) * 4).to(dtype),
        weight.to(dtype),
        torch.full((rows, columns), torch.nan, dtype=out_dtype),
        None if kind in ("plain", "add") else (torch.rand(inner) + 0.5).to(dtype),
        EPS,
        torch.randn(rows, columns).to(dtype) if kind == "add" else None,
        swiglu,
    )


def use_tables(monkeypatch: pytest.MonkeyPatch, bfloat16: Table, fp8: Table | None = None) -> None:
    """Replace the tables of an H200."""
    tables = {"bfloat16": bfloat16, "fp8": fp8 or {}}
    monkeypatch.setattr(small_m_gemm, "tuning_tables", lambda _device: tables)


def to(operands: Product, device: str) -> Product:
    moved = (there(device, o) if isinstance(o, Tensor | Quantized) else o for o in operands)
    return Product(*moved)  # type: ignore[arg-type]


def expected(operands: Product) -> Tensor:
    x = operands.x.double()
    if operands.norm_weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * operands.norm_weight.double()
    weight = operands.weight
    wide = weight.dequantized() if isinstance(weight, Quantized) else weight
    out = x @ wide.double().T
    if operands.swiglu:
        gate, up = out.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return out if operands.residual is None else out + operands.residual.double()


def check(operands: Product, config: GemmConfig, device: str) -> None:
    moved = to(operands, device)
    launch(moved, config)
    wanted = expected(operands)
    error = (moved.out.cpu().double() - wanted).norm() / wanted.norm()
    assert error < (1e-5 if operands.x.dtype == torch.float32 else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "sizes"), diagonal(CONFIGS.values(), KINDS, [(3, 64, 48), (17, 80, 33)])
)
def test_a_tile(
    kind: str,
    sizes: tuple[int, int, int],
    config: GemmConfig,
    device: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the norm before it, and inside it."""
    check(product(kind, *sizes, dtype), config, device)
    if kind in NORM_KINDS:
        monkeypatch.delattr(small_m_gemm, "rms_norm")
        check(product(kind, *sizes, dtype), config._replace(norm_inside=True), device)


@pytest.mark.parametrize("rows", [1, 16, 31, 64, on_gpu(2), on_gpu(32)])
@pytest.mark.parametrize("norm_inside", [False, True])
def test_rows_and_columns(rows: int, norm_inside: bool, device: str, dtype: torch.dtype) -> None:
    config = CONFIGS["wide"]._replace(norm_inside=norm_inside)
    for columns in (64, 173):
        check(product("norm", rows, 160, columns, dtype), config, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "sizes"),
    diagonal(SPLITS.values(), ["plain", "add", "norm", "swiglu"], [(17, 112, 33), (1, 160, 48)]),
)
def test_split_k_again_and_again(
    kind: str, sizes: tuple[int, int, int], config: GemmConfig, device: str, dtype: torch.dtype
) -> None:
    partials, counters = small_m_gemm.workspace(torch.device(device))
    for norm_inside in (False, True)[: 1 + (kind in NORM_KINDS)]:
        partials.fill_(torch.nan)
        check(product(kind, *sizes, dtype), config._replace(norm_inside=norm_inside), device)
        assert not counters.any()


def test_more_splits_than_tiles_of_the_inner_dimension(device: str, dtype: torch.dtype) -> None:
    check(product("add", 3, 64, 48, dtype), GemmConfig("mma", 16, 32, 5, 4, 3, 0), device)


def test_split_k_gives_the_same_bits_every_time(device: str, dtype: torch.dtype) -> None:
    operands = to(product("norm", 3, 160, 48, dtype), device)
    config = SPLITS["mma by 3"]._replace(norm_inside=True)
    launch(operands, config)
    first = operands.out.clone()
    for _ in range(2):
        launch(operands, config)
        assert torch.equal(operands.out, first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "sizes"), diagonal(GEMVS.values(), KINDS, [(144, 333), (256, 48)])
)
def test_one_row(
    kind: str, sizes: tuple[int, int], config: GemmConfig, device: str, dtype: torch.dtype
) -> None:
    check(product(kind, 1, *sizes, dtype), config, device)


@pytest.mark.parametrize(
    ("kind", "rows", "config"),
    [
        *(("norm", 1, GEMVS["whole"]), ("swiglu", 1, GEMVS["in turn"])),
        *(("add", 3, CONFIGS["mma"]), ("swiglu", 17, CONFIGS["slices"])),
        *(("swiglu", 3, SPLITS["mma by 2"]), ("add", 3, SPLITS["whole by 2"])),
        *(on_gpu("swiglu", 17, CONFIGS["wide"]), on_gpu("norm", 64, CONFIGS["wide"])),
        *(on_gpu("add", 31, SPLITS["slices by 3"]), on_gpu("swiglu", 1, GEMVS["whole"])),
        on_gpu("swiglu", 33, SPLITS["mma by 3"]),
    ],
)
def test_weights_of_8_bits(
    kind: str, rows: int, config: GemmConfig, device: str, dtype: torch.dtype
) -> None:
    operands = product(kind, rows, 160, 48, dtype)
    # scales that differ from column to column
    weight = operands.weight.float() * torch.linspace(0.1, 5, len(operands.weight))[:, None]
    check(operands._replace(weight=quantize(weight)), config, device)


@pytest.mark.parametrize("kind", ["add", "norm", "logits", "swiglu"])
def test_what_is_guessed_for_sizes_not_measured(
    kind: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tables(monkeypatch, {})
    operands = product(kind, 1, 272, 40, dtype)
    config = choose(kind, 1, *operands.weight.shape)
    assert config is not None
    check(operands, config, device)
    assert choose(kind, 3, *operands.weight.shape) is None


def test_the_table_decides_by_the_rows_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GemmConfig("mma", 16, 32, 1, 4, 3, 0)
    use_tables(monkeypatch, {("add", 48, 64, 32): config, ("add", 48, 64, 64): None})
    assert choose("add", 17, 48, 64) == choose("add", 32, 48, 64) == config
    assert choose("add", 33, 48, 64) is None


def test_weights_of_8_bits_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GemmConfig("mma", 16, 32, 1, 4, 3, 0, norm_inside=True)
    other = GemmConfig("mma", 32, 32, 1, 4, 3, 0)
    table: Table = {("norm", 48, 64, rows): config for rows in (16, 32)}
    use_tables(monkeypatch, table, {("norm", 48, 64, 32): other})
    assert choose("norm", 9, 48, 64, is_fp8=True) == config._replace(norm_inside=False)
    assert choose("norm", 32, 48, 64, is_fp8=True) == other
    assert choose("norm", 32, 48, 64) == config


@pytest.mark.parametrize(("rows", "inner"), [(0, 64), (65, 64), (1, 72)])
def test_chooses_nothing_for_what_no_kernel_takes(
    rows: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GemmConfig("mma", 16, 32, 1, 4, 3, 0)
    use_tables(monkeypatch, {("add", 48, 64, block): config for block in (16, 128)})
    assert choose("add", rows, 48, inner) is None


def test_only_16_bits_are_multiplied_here() -> None:
    assert multiply("add", torch.zeros(1, 64), torch.zeros(48, 64)) is None


def test_what_was_measured_fits_the_workspace() -> None:
    bfloat16, fp8 = packaged_tables()["bfloat16"], packaged_tables()["fp8"]
    assert len(bfloat16) > 100
    assert len(fp8) > 40
    for (kind, num_weights, _, rows), config in (*bfloat16.items(), *fp8.items()):
        if config and rows > 1:
            columns = num_weights // (2 if kind == "swiglu" else 1)
            with torch.device("meta"):
                operands = product("plain", rows, 16, columns, torch.float32)
            small_m_gemm._check_workspace(operands, config, -(-columns // config.bn))


def test_refuses_sums_that_do_not_fit() -> None:
    operands = product("add", 64, 16, 16896, torch.float32)
    with pytest.raises(
        ValueError, match="got 1056 tiles and 8651264 sums, expected at most 8192 tiles"
    ):
        launch(operands, GemmConfig("mma", 16, 16, 8, 4, 3, 0))


def test_refuses_more_splits_than_are_added_up() -> None:
    with pytest.raises(ValueError, match="split_k: got 9, expected at most 8"):
        launch(product("add", 3, 64, 48, torch.float32), GemmConfig("mma", 16, 16, 9, 4, 3, 0))
