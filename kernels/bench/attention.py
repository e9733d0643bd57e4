"""Decode attention against flash-attn 2: `python -m penstock.kernels.bench.attention`.

Prints microseconds per layer, and the share of a device copy's rate at which keys and values are
read, for head layouts, batches and context lengths; with --fp8, also of a cache in 8 bits, and with
--sweep, the best tunings of some.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor

from penstock.kernels.attention.triton_decode_items import FEW_ROWS, Tuning, default_tuning
from penstock.kernels.bench.decode_layers import FLASH_BLOCK_SIZE, Layers, Point, relative_error
from penstock.kernels.bench.timing import graph_us

HEADS = ((16, 8), (32, 8), (40, 8), (64, 8), (16, 2))
BATCHES = (1, 16, 64, 256)
CONTEXTS = (512, 1024, 4096, 32768)
BLOCK_SIZES = (FLASH_BLOCK_SIZE, 64, 16)
ALL_BLOCK_SIZES_OF = (32, 8)
"""the layout of heads that is measured with all of them, the others with the first"""
MAX_KV_BYTES = 60 << 30
REPEATS, MIN_US = 3, 1000.0
TOLERANCE, FP8_TOLERANCE = 1e-2, 6e-2


SWEPT = [
    Point(*heads, batch, context)
    for heads in HEADS
    for batch, contexts in ((1, CONTEXTS), (16, (512, 1024)), (64, (512, 1024)), (256, (1024,)))
    for context in contexts
]
TILES = ((32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 3))
"""block_n, num_warps and num_stages of what --sweep tries"""


def points() -> Iterator[Point]:
    """Every point of the table whose keys and values fit."""
    for heads, batch, context in product(HEADS, BATCHES, CONTEXTS):
        block_sizes = BLOCK_SIZES if heads == ALL_BLOCK_SIZES_OF else BLOCK_SIZES[:1]
        for block_size in block_sizes:
            point = Point(*heads, batch, context, block_size)
            if point.kv_bytes <= MAX_KV_BYTES:
                yield point


def tunings(point: Point) -> Iterator[Tuning]:
    """What --sweep tries, the default first."""
    yield default_tuning(point.batch, point.num_heads // point.num_kv_heads)
    for tile, programs_per_sm, min_tiles in product(TILES, (1, 2, 3, 4), (1, 2)):
        yield Tuning(*tile, programs_per_sm, min_split=tile[0] * min_tiles)


def copy_rate() -> float:
    """Bytes per microsecond that a kernel which copies reads and writes."""
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    # A copy in a graph would be the copy engine's, which is slower.
    return 2 * source.nbytes / graph_us([lambda: torch.neg(source, out=target)], REPEATS, MIN_US)


def measure(point: Point, rate: float, fp8: bool) -> dict[str, float | None]:
    """One row of the table, without flash-attn's time where it can't do the block size."""
    layers = Layers(point)
    ours, expected = layers.ours(layers.planned()), layers.expected()
    error = relative_error(ours[0](), expected)
    flash_us = None
    if point.block_size == FLASH_BLOCK_SIZE:
        flash_us = graph_us(layers.flash(), REPEATS, MIN_US)
    ours_us = graph_us(ours, REPEATS, MIN_US)
    row = {
        **asdict(point),
        "flash_us": flash_us,
        "flash_share": point.kv_bytes / flash_us / rate if flash_us else None,
        "ours_us": ours_us,
        "ours_share": point.kv_bytes / ours_us / rate,
        "speedup": flash_us / ours_us if flash_us else None,
        "error": error,
    }
    return {**row, **measure_fp8(layers, expected, ours_us)} if fp8 else row


def measure_fp8(layers: Layers, expected: Tensor, bf16_us: float) -> dict[str, float]:
    """The row's end, of the same keys and values in 8 bits."""
    layers.quantize()
    ours = layers.ours(layers.planned())
    error = relative_error(ours[0](), expected)
    us = graph_us(ours, REPEATS, MIN_US)
    return {"fp8_us": us, "fp8_speedup": bf16_us / us, "fp8_error": error}


def compile_tile(heads: tuple[int, int], tile: tuple[int, int, int]) -> None:
    """Leaves the kernels of a layout in Triton's cache on disk, for all batches that are swept."""
    for batch in sorted({point.batch for point in SWEPT}):
        layers = Layers(Point(*heads, batch, FLASH_BLOCK_SIZE))
        layers.ours(layers.planned(Tuning(*tile)))[0]()


def compile_swept() -> None:
    """In as many processes as there are cores, or compiling would take most of the time."""
    tasks = list(product(HEADS, TILES))
    spawn, cores = multiprocessing.get_context("spawn"), len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, len(tasks), 16), mp_context=spawn) as pool:
        list(pool.map(compile_tile, *zip(*tasks, strict=True)))


def sweep(point: Point) -> list[dict[str, float]]:
    """Every tuning's time and error at a point, the default first; one plan is measured once."""
    layers = Layers(point)
    expected = layers.expected()
    flash_us = graph_us(layers.flash(), REPEATS, MIN_US)
    rows, measured = [], dict[object, dict[str, float]]()
    for tuning in tunings(point):
        attention = layers.planned(tuning)
        key = (tuning[:3], attention.max_items(point.batch), str(attention.items.tolist()))
        if key not in measured:
            ours = layers.ours(attention)
            layers.out.fill_(torch.nan)
            error = relative_error(ours[0](), expected)
            measured[key] = {"us": graph_us(ours, REPEATS, MIN_US), "error": error}
        rows.append(asdict(point) | tuning._asdict() | measured[key] | {"flash_us": flash_us})
    return rows


def tuning_of(row: Mapping[str, float]) -> str:
    """Its numbers in the order of `Tuning`."""
    return "/".join(str(row[field]) for field in Tuning._fields)


def report_sweep() -> list[Mapping[str, float | None]]:
    """Prints every point's times: flash-attn's, ours now, and the five best; returns all."""
    compile_swept()
    print(f"µs a layer and {'/'.join(Tuning._fields)}: flash-attn, now, best", flush=True)
    swept = []
    for point in SWEPT:
        rows = sweep(point)
        swept += rows
        name = f"{point.num_heads}/{point.num_kv_heads} batch {point.batch} context {point.context}"
        fastest = {row["us"]: row for row in reversed(rows)}
        best = [fastest[us] for us in sorted(fastest)[:5]]
        cells = (f"{row['us']:.1f} {tuning_of(row)}" for row in (rows[0], *best))
        print(markdown((name, f"{rows[0]['flash_us']:.1f}", *cells)), flush=True)
    report_groups(swept)
    return list(swept)


def report_groups(swept: Iterable[Mapping[str, float]]) -> None:
    """Prints each group's best tunings for few and for many rows, over all points together."""
    print("speedup over flash-attn, geometric mean and (least), and tuning: now, best")
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in swept:
        group = int(row["num_heads"] // row["num_kv_heads"])
        name = f"group {group}, {'few' if row['batch'] <= FEW_ROWS else 'many'} rows"
        cells[name][tuning_of(row)].append(row["flash_us"] / row["us"])
    for name, speedups in cells.items():
        means = {tuning: geometric_mean(of) for tuning, of in speedups.items()}
        best = sorted(means, key=lambda tuning: -means[tuning])[:5]
        shown = (f"{means[t]:.3f} ({min(speedups[t]):.2f}) {t}" for t in (next(iter(means)), *best))
        print(markdown((name, *shown)), flush=True)


def markdown(cells: Iterable[object]) -> str:
    """One line of a table; a float with three digits that count, None as nothing."""
    texts = (f"{cell:.3g}" if isinstance(cell, float) else cell for cell in cells)
    return f"| {' | '.join('' if text is None else str(text) for text in texts)} |"


def report(rows: Iterable[Mapping[str, float | None]]) -> list[Mapping[str, float | None]]:
    """Prints each row as it comes, the first with a head; returns all."""
    printed: list[Mapping[str, float | None]] = []
    for row in rows:
        if not printed:
            print(markdown(row), markdown("-" for _ in row), sep="\n", flush=True)
        print(markdown(row.values()), flush=True)
        printed.append(row)
    return printed


def main() -> int:
    """Returns 1 if a result differs from flash-attn's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try tunings at a few points")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows, too")
    parser.add_argument("--fp8", action="store_true", help="measure a cache in 8 bits, too")
    arguments = parser.parse_args()
    if arguments.sweep:
        rows = report_sweep()
    else:
        rate = copy_rate()
        print(f"a copy reads and writes {rate / 1e6:.2f} TB/s\n", flush=True)
        rows = report(measure(point, rate, arguments.fp8) for point in points())
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    wrong = [
        row
        for row in rows
        if not ((row["error"] or 0) <= TOLERANCE and (row.get("fp8_error") or 0) <= FP8_TOLERANCE)
    ]
    for row in wrong:
        print(f"differs from flash-attn: {row}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
