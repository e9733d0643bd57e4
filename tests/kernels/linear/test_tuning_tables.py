"""Tuning tables by GPU: which file holds, and what is done with one that does not."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.device import Device
from penstock.kernels.linear import small_m_gemm, tuning_tables
from penstock.kernels.linear.small_m_gemm import choose, multiply
from penstock.kernels.linear.tile_sizes import GemmConfig
from penstock.kernels.linear.tuning_tables import (
    MEASURED,
    Origin,
    Tables,
    cached_table,
    decode,
    encode,
    origin_of,
    packaged_tables,
    write,
)

RTX = Device((8, 9), 99 << 10, 128, "NVIDIA GeForce RTX 4090")
CONFIG = GemmConfig("mma", 16, 32, 1, 4, 3, 0)
TABLES: Tables = {"bfloat16": {("add", 48, 64, 16): CONFIG, ("add", 48, 64, 32): None}, "fp8": {}}
ORIGIN = origin_of(RTX)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning_tables.tuning_tables.cache_clear()
    yield
    tuning_tables.tuning_tables.cache_clear()


def test_the_file_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tmp_path / "penstock" / "tune" / "NVIDIA-GeForce-RTX-4090.json"
    assert cached_table(RTX.name) == expected
    assert cached_table("../a b/c").name == "-a-b-c.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cached_table("x") == Path("/home/someone/.cache/penstock/tune/x.json")


def test_a_written_table_is_used_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert choose("add", 9, 48, 64, device=RTX) is None
    tuning_tables.tuning_tables.cache_clear()
    write(cached_table(RTX.name), TABLES, ORIGIN)
    with caplog.at_level(logging.INFO):
        assert choose("add", 9, 48, 64, device=RTX) == CONFIG
        assert choose("add", 30, 48, 64, device=RTX) is None
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("products: 2 tile sizes for NVIDIA GeForce RTX 4090 from ")
    assert choose("add", 9, 48, 64, device=RTX._replace(name="")) is None  # a simulated GPU


def test_a_table_updates_that_of_an_h200() -> None:
    h200 = Device(name="NVIDIA H200")
    measured = "add", 16, 1024, 2048
    assert choose(*measured, device=h200) == packaged_tables()["bfloat16"]["add", 1024, 2048, 16]
    assert choose("add", 16, 48, 64, device=h200) is None  # not measured: cuBLAS
    tuning_tables.tuning_tables.cache_clear()
    write(cached_table(h200.name), TABLES, origin_of(h200))
    assert choose("add", 16, 48, 64, device=h200) == CONFIG
    assert choose(*measured, device=h200) == packaged_tables()["bfloat16"]["add", 1024, 2048, 16]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"version": 2}, "version: got 2, expected 1"),
        ({"gpu": "NVIDIA L4"}, "gpu: got 'NVIDIA L4', expected 'NVIDIA GeForce RTX 4090'"),
        ({"num_sms": 100}, "num_sms: got 100, expected 128"),
        ({"triton": "2.0.0"}, "triton: got '2.0.0', expected"),
        ({"kernels": "0"}, "kernels: got '0', expected"),
    ],
)
def test_another_origin_is_ignored_with_one_line(
    changed: dict[str, object], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    other: Origin = msgspec.structs.replace(ORIGIN, **changed)  # type: ignore[arg-type]
    write(cached_table(RTX.name), TABLES, other)
    for _ in range(2):
        assert choose("add", 9, 48, 64, device=RTX) is None
    assert len(caplog.messages) == 1
    assert sentence in caplog.messages[0]
    assert "is ignored" in caplog.messages[0]
    assert "`launch tune` writes it again" in caplog.messages[0]


def test_a_file_that_can_not_be_read_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    path = cached_table(RTX.name)
    path.mkdir(parents=True)
    assert choose("add", 9, 48, 64, device=RTX) is None
    assert "is ignored: [Errno 21]" in caplog.messages[0]


@given(st.integers(0, len(encode(TABLES, ORIGIN)) - 2))
def test_no_part_of_a_file_is_taken(end: int) -> None:
    data = encode(TABLES, ORIGIN)
    assert decode(data, ORIGIN) == TABLES
    with pytest.raises(ValueError, match=r".+"):
        decode(data[:end], ORIGIN)


@given(st.binary(max_size=80), st.integers(0, 400))
def test_no_damaged_file_has_another_effect(noise: bytes, at: int) -> None:
    data = encode(TABLES, ORIGIN)
    damaged = data[:at] + noise + data[at + len(noise) :]
    try:
        found = decode(damaged, ORIGIN)
    except ValueError:
        return
    for table in found.values():
        for config in table.values():
            assert config is None or config.num_warps <= 16


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("add 48 64", [*CONFIG]),
        ("sub 48 64 16", [*CONFIG]),
        ("add 48 64 many", [*CONFIG]),
        ("add 48 64 16", ["wgmma", *CONFIG[1:]]),
        ("add 48 64 16", ["mma", 17, *CONFIG[2:]]),
        ("add 48 64 16", ["mma", 16, 32, 9, 4, 3, 0]),
        ("add 48 64 16", ["mma", 16, 32, 1, 64, 3, 0]),
        ("add 48 64 16", ["mma", 16, 32, 1, 4, 0, 0]),
        ("add 48 64 16", ["mma", 16, 32, 1, 4, 3, 32]),
        ("add 48 64 16", 7),
        ("add 48 64 16", ["mma", 16, 8, 1, 4, 3, 0]),
        ("add 48 64 16", ["gemv", 8, 64, 1, 4, 1, 0]),
        ("add 48 64 16", ["slices", 16, 32, 1, 4, 3, 0]),
        ("add 48 512 16", ["ranges", 8, 256, 2, 4, 3, 0]),
        ("add 48 512 16", ["ranges", 8, 256, 1, 8, 3, 0]),
        ("add 48 512 16", ["ranges", 8, 256, 1, 4, 3, 256]),
        ("add 48 640 16", ["ranges", 8, 256, 1, 4, 3, 0]),
        ("logits 48 512 16", ["ranges", 8, 256, 1, 4, 3, 0]),
    ],
)
def test_refuses_entries_that_no_kernel_takes(key: str, entry: object) -> None:
    content = {"origin": ORIGIN, "tables": {"bfloat16": {key: entry}}}
    with pytest.raises(ValueError, match=r".+"):
        decode(msgspec.json.encode(content), ORIGIN)


def test_the_packages_table_is_as_it_would_be_written() -> None:
    assert encode(packaged_tables()) == MEASURED.read_bytes()


def test_a_product_by_a_written_table(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    write(cached_table(RTX.name), TABLES, ORIGIN)
    monkeypatch.setattr(small_m_gemm, "this_device", lambda: RTX)
    launched = []
    launch = small_m_gemm.launch
    monkeypatch.setattr(
        small_m_gemm, "launch", lambda *args: launched.append(args[1]) or launch(*args)
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, weight = (torch.randn(size, device=device).to(dtype) for size in ((9, 64), (48, 64)))
    found = multiply("add", x, weight)
    assert launched == [CONFIG]
    assert found is not None
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T, rtol=2e-2, atol=0.1)
