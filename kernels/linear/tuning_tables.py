"""Tables of tile sizes by GPU: in this package, and in the user's cache.

`launch tune` writes the user's cache.

A table in the cache is valid for the GPU, the version of Triton and the kernels that were measured.
"""

import hashlib
import json
import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import triton
from msgspec import Struct

from penstock.kernels.device import Device
from penstock.kernels.linear.tile_sizes import GemmConfig, Table

log = logging.getLogger(__name__)
VERSION = 1  # version of the file's format
KINDS = ("add", "norm", "swiglu", "logits")
FOLDER = Path(__file__).with_name("tuning")
MEASURED = FOLDER / "NVIDIA-H200.json"
SOURCES = (
    "small_m_gemm.py",
    "triton_small_m_gemm.py",
    "tile_sizes.py",
    "../triton_elementwise.py",
    "../triton_pdl.py",
)
Tables = dict[str, Table]  # tables by dtype of the weights: "bfloat16" and "fp8"


class Origin(Struct, frozen=True, kw_only=True):
    """Origin of a table, which is valid if all fields are equal."""

    version: int
    gpu: str
    capability: tuple[int, int]
    shared_bytes: int
    num_sms: int
    triton: str
    kernels: str  # digest of the kernels' source


class _TuningFile(Struct):
    """File in the cache; its tables are read only if its origin matches."""

    origin: Origin
    tables: msgspec.Raw


def origin_of(device: Device) -> Origin:
    """Return the origin of tables measured now."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return Origin(
        version=VERSION,
        gpu=device.name,
        capability=device.capability,
        shared_bytes=device.shared_bytes,
        num_sms=device.num_sms,
        triton=triton.__version__,
        kernels=digest.hexdigest()[:12],
    )


def file_name(gpu: str) -> str:
    """Return the name of a GPU's file, such as `NVIDIA-GeForce-RTX-4090.json`."""
    return re.sub(r"\W+", "-", gpu) + ".json"


def cached_table(gpu: str) -> Path:
    """Return the path of a GPU's table in the user's cache, `~/.cache/penstock/tune`."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "penstock" / "tune" / file_name(gpu)


def decode(data: bytes, wanted: Origin) -> Tables:
    """Return the tables of a file in the cache. Raises ValueError if they are not valid."""
    found = msgspec.json.decode(data, type=_TuningFile)
    for field in wanted.__struct_fields__:
        got, expected = getattr(found.origin, field), getattr(wanted, field)
        if got != expected:
            raise ValueError(f"{field}: got {got!r}, expected {expected!r}")
    return _parse(msgspec.json.decode(found.tables, type=dict[str, dict[str, GemmConfig | None]]))


def encode(tables: Tables, origin: Origin | None = None) -> bytes:
    """Return a file's content, with a line for each entry; origin: only for the cache."""
    sections = []
    for dtype, table in tables.items():
        entries = ((" ".join(map(str, key)), table[key]) for key in sorted(table))
        lines = [f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries]
        sections.append(f"  {json.dumps(dtype)}: {{\n" + ",\n".join(lines) + "\n  }")
    text = "{\n" + ",\n".join(sections) + "\n}"
    if origin is not None:
        text = f'{{"origin": {msgspec.json.encode(origin).decode()},\n"tables": {text}}}'
    return f"{text}\n".encode()


def write(path: Path, tables: Tables, origin: Origin | None = None) -> None:
    """Write a file atomically, so that no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(encode(tables, origin))
    new.replace(path)


@cache
def packaged_tables(path: Path = MEASURED) -> Tables:
    """Return the tables of a file of this package."""
    return _parse(msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]]))


@cache
def tuning_tables(device: Device) -> Tables:
    """Return the tables valid for a device: the package's, updated by the user's cache."""
    own = FOLDER / file_name(device.name)
    tables: Tables = {"bfloat16": {}, "fp8": {}}
    if device.is_measured or own.exists():
        tables |= packaged_tables(own if own.exists() else MEASURED)
    path = cached_table(device.name)
    try:
        found = decode(path.read_bytes(), origin_of(device)) if device.name else {}
    except FileNotFoundError:
        return tables
    except (OSError, ValueError) as error:  # msgspec's errors are subclasses of ValueError
        log.warning("%s is ignored: %s; `launch tune` writes it again", path, error)
        return tables
    if found:
        number = sum(map(len, found.values()))
        log.info("products: %d tile sizes for %s from %s", number, device.name, path)
    return {dtype: tables.get(dtype, {}) | found.get(dtype, {}) for dtype in tables | found}


def _parse(tables: dict[str, dict[str, Any]]) -> Tables:
    """Return the tables with the kernels' keys and entries. Raises ValueError."""
    parsed: Tables = {}
    for dtype, entries in tables.items():
        parsed[dtype] = {}
        for key, entry in entries.items():
            kind, *sizes = key.split()
            if kind not in KINDS or len(sizes) != 3:
                raise ValueError(f"key: got {key!r}, expected 'add 1024 2048 16'")
            num_weights, inner, rows = map(int, sizes)
            config = None if entry is None else msgspec.convert(entry, GemmConfig)
            if config is not None and not _is_valid(kind, inner, rows, config):
                raise ValueError(f"{key}: got {list(config)}, which no kernel takes")
            parsed[dtype][kind, num_weights, inner, rows] = config
    return parsed


def _is_valid(kind: str, inner: int, rows: int, config: GemmConfig) -> bool:
    powers = config.bn, config.bk, config.num_warps, max(config.prefetch, 1)
    divides = config.kernel in ("slices", "ranges")
    return (
        all(number > 0 and not number & (number - 1) for number in powers)
        and config.kernel in ("mma", "slices", "ranges", "gemv")
        and 1 <= config.split_k <= 8
        and config.num_warps <= 16
        and 1 <= config.num_stages <= 8
        and (config.prefetch == 0 or config.prefetch >= 64)
        and config.bk >= 16 * (config.num_warps if divides else 1)
        and (config.kernel != "gemv" or rows == 1)
        and (config.kernel != "ranges" or _has_ranges(kind, inner, config))
    )


def _has_ranges(kind: str, inner: int, config: GemmConfig) -> bool:
    """Return whether four warps can divide the inner dimension into whole tiles."""
    is_whole = inner % config.bk == 0 and not config.prefetch
    return is_whole and kind != "logits" and (config.num_warps, config.split_k) == (4, 1)
