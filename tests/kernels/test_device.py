"""Launches by GPU: an H200's are those that were measured, and others fit the GPU's limits.

The compiler needs no GPU. It runs in a process without Triton's interpreter: in `make test` for one
launch of two kernels, in `make test-long` for all launches on the six architectures since Ampere.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.attention import triton_decode, triton_prefill
from penstock.kernels.attention.triton_decode import (
    DecodeTuning,
    decode_shared_bytes,
)
from penstock.kernels.attention.triton_prefill import PrefillTuning, prefill_shared_bytes
from penstock.kernels.device import SIMULATED_GPU, Device, simulated, this_device
from penstock.kernels.linear.small_m_gemm import GemmConfig, choose
from penstock.kernels.linear.tile_sizes import GemmShape, candidates
from penstock.kernels.linear.triton_fp8_gemm import tile_of, tile_shared_bytes
from penstock.kernels.linear.tuning_tables import packaged_tables
from penstock.kernels.packed.triton_packed import PackedTile, packed_shared_bytes
from penstock.kernels.recurrent.triton_chunks import ChunkTuning
from penstock.kernels.triton_moe import (
    FP8_TUNINGS,
    NARROW,
    TUNINGS,
    GemmTile,
    choose_tuning,
    gemm_shared_bytes,
)
from tests.kernels.compile_launches import GPUS, SAMPLE
from tests.search import FACTOR

H200 = Device((9, 0), 232448, 132)
DEVICES = {arch: simulated(text) for arch, text in GPUS.items()}
MAX_STACK, MAX_STACK_OF_WIDE_HEADS = 256, 1200
"""bytes of registers that a thread of these launches may spill"""
KINDS = (86, 120)
"""the last architectures without and with instructions for e4m3"""
ELSEWHERE = {True: {"_weight_only_kernel"}, False: {"_block_product"}}
"""kernels that GPUs with, or without, instructions for e4m3 don't launch"""


@pytest.mark.parametrize(
    ("rows", "group", "is_fp8", "tuning"),
    [
        (1, 2, False, (128, 4, 3, 1, 128)),
        (32, 16, True, (128, 4, 3, 1, 128)),
        (33, 2, False, (64, 4, 2, 2, 64)),
        (256, 4, False, (32, 4, 4, 2, 32)),
        (64, 8, True, (128, 4, 3, 2, 128)),
        (65, 8, True, (64, 2, 2, 2, 64)),
    ],
)
def test_decode_attention_on_an_h200(
    rows: int, group: int, is_fp8: bool, tuning: tuple[int, ...]
) -> None:
    chosen = triton_decode.default_tuning(rows, group, is_fp8=is_fp8, device=H200)
    assert chosen == tuning


@pytest.mark.parametrize("is_fp8", [False, True])
def test_prefill_on_an_h200(is_fp8: bool) -> None:
    sizes = [(64, 16), (64, 128), (128, 16), (128, 128), (128, 256)]
    chosen = [triton_prefill.default_tuning(*size, is_fp8=is_fp8, device=H200) for size in sizes]
    assert chosen == [(32, 4, 3), (32, 4, 3), (64, 8, 3), (128, 8, 3), (128, 8, 3)]


def test_prefill_in_fp8_spills_no_registers() -> None:
    """With short blocks on sm_120, or without instructions for e4m3."""
    for arch, keys in ((80, 32), (86, 32), (89, 64), (100, 64), (120, 32)):
        tuning = keys, 8, 3
        chosen = triton_prefill.default_tuning(128, 16, is_fp8=True, device=DEVICES[arch])
        assert chosen == tuning


def test_products_on_an_h200() -> None:
    for dtype, table in packaged_tables().items():
        for (kind, weights, inner, rows), config in table.items():
            is_fp8 = dtype == "fp8"
            expected = config._replace(norm_inside=False) if config and is_fp8 else config
            assert choose(kind, rows, weights, inner, is_fp8, H200) == expected
    guesses = {
        ("add", 5120, 25600): (1, 32768, 1, 8, 1, 0),
        ("norm", 10240, 5120): (4, 8192, 1, 8, 1, 0),
        ("swiglu", 51200, 5120): (2, 8192, 1, 8, 1, 0),
        ("swiglu", 6144, 17408): (8, 1024, 1, 4, 4, 1024),
    }
    for (kind, weights, inner), guess in guesses.items():
        if (kind, weights, inner, 1) not in packaged_tables()["bfloat16"]:
            assert choose(kind, 1, weights, inner, device=H200) == GemmConfig("gemv", *guess)
    tiles = [tile_of(rows, H200) for rows in (1, 40, 256, 257, 4096)]
    assert tiles == [(16, 64, 4, 6), *[(64, 64, 4, 6)] * 2, *[(128, 128, 8, 4)] * 2]


def test_experts_on_an_h200() -> None:
    for is_fp8, tunings in ((False, TUNINGS), (True, FP8_TUNINGS)):
        for most, tuning in tunings:
            assert choose_tuning(min(most, 512) * 128, 128, 768, is_fp8, H200) == tuning
    assert choose_tuning(8, 128, 768, False, H200) == NARROW
    assert choose_tuning(8, 128, 768, True, H200) == FP8_TUNINGS[0][1]


@pytest.mark.parametrize("device", DEVICES.values(), ids=GPUS)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_every_choice_fits(device: Device, is_fp8: bool) -> None:
    for head_dim in (16, 64, 128, 256):
        for rows in range(1, 300, 7):
            tuning = triton_decode.default_tuning(rows, 4, head_dim, is_fp8=is_fp8, device=device)
            assert decode_shared_bytes(tuning, head_dim, is_fp8=is_fp8) <= device.shared_bytes
        for sizes in ((64, 16), (128, 16), (128, 128)):
            prefill = triton_prefill.default_tuning(*sizes, head_dim, is_fp8=is_fp8, device=device)
            used = prefill_shared_bytes(prefill, sizes[0], head_dim, device, is_fp8=is_fp8)
            assert used <= device.shared_bytes
    for pairs in (1, 100, 1000, 4000, 20_000):
        experts = choose_tuning(pairs, 128, 768, is_fp8, device)
        for tile, number in ((experts.gate_up, 2), (experts.down, 1)):
            assert gemm_shared_bytes(tile, experts.bm, number, is_fp8) <= device.shared_bytes
    for rows in (1, 64, 257):
        assert tile_shared_bytes(tile_of(rows, device)) <= device.shared_bytes


@pytest.mark.parametrize("arch", [80, 86, 89, 100, 120])
def test_the_table_of_an_h200_holds_for_no_other_gpu(arch: int) -> None:
    measured = ("add", 16, 4096, 12288)
    assert choose(*measured, device=H200) == packaged_tables()["bfloat16"]["add", 4096, 12288, 16]
    shape = GemmShape("add", 4096, 12288)
    assert choose(*measured, device=DEVICES[arch]) in candidates(shape, 16, 2, DEVICES[arch])
    assert choose("add", 64, 4096, 12288, device=DEVICES[arch]) is None
    assert choose("swiglu", 1, 6144, 17408, device=DEVICES[arch]) is not None


def test_a_launch_that_fits_nowhere() -> None:
    with pytest.raises(ValueError, match="got 1024 bytes a block, expected more for 2048"):
        Device(shared_bytes=1024).fitting([4096, 2048], lambda size: size)


def test_a_simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIMULATED_GPU, "sm_120,shared=99,sms=84")
    this_device.cache_clear()
    try:
        found = this_device()
    finally:
        monkeypatch.undo()
        this_device.cache_clear()
    assert found == Device((12, 0), 101376, 84)
    assert found.has_pdl
    assert found.has_fp8
    assert not DEVICES[89].has_pdl
    assert simulated("sm_89,shared=99,sms=84,memory=24").memory_bytes == 24 * 2**30
    for text in ("sm_89", "sm89,shared=99,sms=84", "sm_89,shared=99KB,sms=84"):
        with pytest.raises(ValueError, match=r"PENSTOCK_SIMULATED_GPU: got 'sm.*expected 'sm_89,"):
            simulated(text)


def compile_launches(
    folder: Path, architectures: Iterable[int] = GPUS, parts: int = 1, only: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """Return what the compiler reports for the launches on some architectures."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder)}
    for name in ("TRITON_INTERPRET", SIMULATED_GPU):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_launches"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, ",".join(map(str, architectures)), str(parts), *map(str, only)],
        cwd=root, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled_among(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [report for report in reports if "shared" in report or "error" in report]


def estimate(report: dict[str, Any]) -> int | None:
    """Return the shared memory by which a launch is chosen; None: this kernel has no choice."""
    constants, fp8 = report["constants"], report["case"] == "fp8"
    warps, stages = report["num_warps"], report["num_stages"]
    match report["kernel"]:
        case "_decode_kernel":
            tuning = DecodeTuning(constants["BLOCK_N"], warps, stages)
            return decode_shared_bytes(tuning, constants["HEAD_DIM"], is_fp8=fp8)
        case "_prefill_attention_kernel":
            prefill = PrefillTuning(constants["BLOCK_N"], warps, stages)
            sizes = constants["BLOCK_M"], constants["HEAD_DIM"]
            return prefill_shared_bytes(prefill, *sizes, DEVICES[report["arch"]], is_fp8=fp8)
        case "multiply":
            tile = GemmTile(constants["BN"], constants["BK"], warps, stages)
            return gemm_shared_bytes(tile, constants["BM"], 1 + constants["SWIGLU"], fp8)
        case "packed_gemm_kernel" | "multiply_packed":
            packed = PackedTile(
                constants["BM"], constants["BK"], 1, stages, warps, constants["STEPS"]
            )
            number = 1 + constants["SWIGLU"]
            return packed_shared_bytes(constants["BITS"], number, packed)
        case "_walk_kernel":
            chunks = ChunkTuning(stages, constants["VALUES"], warps)
            return chunks.shared_bytes(constants["SIZE"])
        case "_block_product":
            return tile_shared_bytes((constants["BM"], constants["BN"], warps, stages))
    return None


def wrong(report: dict[str, Any]) -> bool:
    """Return True if a launch exceeds a limit of its GPU or its estimate."""
    if "error" in report:
        return True
    limit = DEVICES[report["arch"]].shared_bytes
    is_exact = not DEVICES[report["arch"]].is_asynchronous
    is_exact |= report["kernel"] == "_prefill_attention_kernel"
    most = (is_exact and estimate(report)) or limit
    threads, is_wide = 32 * report["num_warps"], report["constants"].get("HEAD_DIM", 0) > 128
    return (
        report["shared"] > min(limit, most)
        or report["registers"] * threads > 1 << 16
        or report["stack"] > (MAX_STACK_OF_WIDE_HEADS if is_wide else MAX_STACK)
    )


def launched_kernels() -> set[str]:
    """Return the Triton kernels that any module of `kernels` launches, as `kernel[grid](...)`."""
    jitted, subscripted = set(), set()
    for path in (Path(__file__).parents[2] / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = [ast.unparse(one) for one in node.decorator_list]
                jitted |= {node.name} if any("triton.jit" in one for one in decorators) else set()
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                subscripted.add(ast.unparse(node.func.value).rpartition(".")[2])
    return jitted & subscripted


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """Return a folder that stays: kernels are compiled again only when their source changes."""
    return request.config.cache.mkdir("triton")  # type: ignore[union-attr]


@pytest.mark.slow
def test_every_kernel_is_among_the_launches_and_two_compile(folder: Path) -> None:
    """Kernels are compiled for the GPU with the least shared memory of those that are listed."""
    reports = compile_launches(folder, KINDS, only=KINDS[-1:])
    for arch in KINDS:
        names = {report["kernel"] for report in reports if report["arch"] == arch}
        missing = launched_kernels() - names
        missing -= ELSEWHERE[DEVICES[arch].has_fp8]
        assert missing == set(), f"sm_{arch}: add a launch to tests/kernels/launch_cases.py"
    compiled = compiled_among(reports)
    assert [report for report in compiled if wrong(report)] == []
    assert {report["kernel"] for report in compiled} == SAMPLE


@pytest.mark.search
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_launches_compile_for_all_architectures(folder: Path) -> None:
    """Each launch for one of them; all for all in `make test-search`, which takes half an hour."""
    parts = len(GPUS) if FACTOR <= 1 else 1
    reports = compile_launches(folder, parts=parts)
    compiled = compiled_among(reports)
    assert [report for report in compiled if wrong(report)] == []
    assert {report["arch"] for report in compiled} == set(GPUS)
    assert len(compiled) >= len(reports) // parts
