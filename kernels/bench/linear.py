"""Products of few rows against cuBLAS with separate kernels; writes the table of the fastest ones.

    python -m penstock.kernels.bench.linear [--sizes 0.6B 8B] [--rows 1 16] [--write FILE]

The four products of a layer are timed in a layer, one after the other tuned; the figures are those
of the whole layer. Sizes and rows that were not measured keep their entries in FILE, as far as it
is the table in use.
"""

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from triton.errors import TritonError

from penstock.kernels.bench.candidates import SIZES, Shape, candidates, shapes
from penstock.kernels.bench.layers import EPS, Configs, Layers, separately
from penstock.kernels.bench.timing import graph_us
from penstock.kernels.gpu import skinny_table
from penstock.kernels.gpu.skinny import (
    EARLY,
    Config,
    Product,
    empty_product,
    launch,
    row_block,
    workspace,
)

ROWS = (1, 16, 32, 64)
MAX_ERROR = 1e-2
FINALISTS = 3
"""are measured again, for longer"""
NUM_PROCESSES = min(16, os.cpu_count() or 1)
POOL = 1 << 30
"""random weights that all shapes are cut from, more than the largest has"""


def operands(shape: Shape, rows: int, weight: Tensor) -> Product:
    """Random x, norm weight and residual for this weight."""
    x = torch.randn(rows, shape.inner).to(weight)
    norm_weight = (torch.rand(shape.inner) + 0.5).to(weight)
    residual = torch.randn(rows, shape.num_columns).to(weight)
    if shape.kind == "add":
        return empty_product(shape.kind, x, weight, residual=residual)
    return empty_product(shape.kind, x, weight, norm_weight, EPS)


def expected(product: Product) -> Tensor:
    """In float32."""
    x = product.x.float()
    if product.norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * product.norm_weight.float()
    parts = range(0, len(product.weight), 1 << 14)
    out = torch.cat([x @ product.weight[i : i + (1 << 14)].float().T for i in parts], -1)
    if product.swiglu:
        gate, up = out.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return out if product.residual is None else out + product.residual.float()


def compile_some(work: Sequence[tuple[Shape, int, Config]]) -> int:
    """Fills triton's cache on disk, by a run; what can't run is met again when it is measured."""
    failed = 0
    for shape, rows, config in work:
        weight = torch.zeros(shape.num_weights, shape.inner, dtype=torch.bfloat16, device="cuda")
        try:
            launch(operands(shape, rows, weight), config)
        except TritonError:
            failed += 1
    torch.cuda.synchronize()
    return failed


def compile_all(measured: Sequence[tuple[Shape, int]]) -> None:
    """In as many processes as there are cores, every kernel once: N and K are no constants."""
    unique: dict[object, tuple[Shape, int, Config]] = {}
    for shape, rows in measured:
        for candidate in candidates(shape, rows):
            small = _small(shape, candidate)
            config = candidate._replace(split_k=min(candidate.split_k, 2))  # no constant either
            small = small._replace(inner=small.inner // candidate.split_k * config.split_k)
            block = row_block(rows)
            fewest = 1 if rows == 1 else block // 2 + 1  # rows of such a block
            unique.setdefault((small, block, config), (small, fewest, config))
    work = list(unique.values())
    begin = time.monotonic()
    parts = [work[first::NUM_PROCESSES] for first in range(NUM_PROCESSES)]
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn")) as pool:
        failed = sum(pool.map(compile_some, parts))
    print(
        f"{len(work)} kernels compiled in {time.monotonic() - begin:.0f} s, {failed} need too much",
        flush=True,
    )


def _small(shape: Shape, config: Config) -> Shape:
    """Compiles to the same kernel."""
    inner = config.bk if shape.inner % config.bk == 0 else config.bk - 16
    if -(-shape.inner // config.bk) > config.split_k:  # else one tile is all
        inner += config.bk
    inner *= config.split_k
    is_large = shape.num_weights * shape.inner > EARLY
    return Shape(shape.kind, 256 * (1 + is_large * EARLY // (256 * inner)), inner)


def is_right(first: Product, config: Config, wanted: Tensor) -> bool:
    """Says aloud if it is not; what needs too much shared memory is not either."""
    first.out.fill_(torch.nan)
    try:
        launch(first, config)
    except TritonError:
        return False
    error = ((first.out.float() - wanted).norm() / wanted.norm()).item()
    if not error < MAX_ERROR:
        print(f"WRONG by {error}: {config} for {list(first.weight.shape)}", flush=True)
        return False
    return True


def right_candidates(shape: Shape, rows: int, pool: Tensor) -> list[Config]:
    """Those that compute what they should."""
    weight = pool[: shape.num_weights * shape.inner].view(-1, shape.inner)
    first = operands(shape, rows, weight)
    wanted = expected(first)
    return [one for one in candidates(shape, rows) if is_right(first, one, wanted)]


def tune_layers(size: str, rows: int, pool: Tensor) -> Configs:
    """One product after the other, each in its place among the best so far, and all again."""
    layers = Layers(size, rows, pool)
    configs: Configs = dict.fromkeys(layers.shapes)
    right: dict[Shape, list[Config]] = {}
    separate = best = layers.us(configs)
    for shape in layers.shapes * 2:
        right[shape] = right.get(shape) or right_candidates(shape, rows, pool)
        times = {config: layers.us(configs | {shape: config}) for config in right[shape]}
        for config in sorted(times, key=lambda config: times[config])[:FINALISTS]:
            again = min(layers.us(configs | {shape: config}) for _ in range(2))
            if again < best:
                best, configs[shape] = again, config
    print(f"| {size} layer | {rows} | {separate:.1f} | {best:.1f} | |", flush=True)
    for shape, chosen in configs.items():
        print(f"| {_name(shape)} | {rows} | | | {_readable(chosen)} |", flush=True)
    return configs


def tune_logits(shape: Shape, rows: int, pool: Tensor) -> Config | None:
    """None if cuBLAS is faster."""
    weight = pool[: shape.num_weights * shape.inner].view(-1, shape.inner)
    product = operands(shape, rows, weight)
    times = {
        config: graph_us([partial(launch, product, config)], 3, 1000)
        for config in right_candidates(shape, rows, pool)
    }
    separate = graph_us([partial(separately, product, torch.float32)], 3, 1000)
    best = min(times, key=lambda config: times[config])
    chosen = best if times[best] < separate else None
    print(
        f"| {_name(shape)} | {rows} | {separate:.1f} | {times[best]:.1f} | {_readable(chosen)} |",
        flush=True,
    )
    return chosen


def _name(shape: Shape) -> str:
    return f"{shape.kind} {shape.inner}→{shape.num_weights}"


def _readable(config: Config | None) -> str:
    return "cuBLAS" if config is None else " ".join(map(str, config))


def write(path: Path, table: dict[skinny_table.Key, skinny_table.Entry | None]) -> None:
    """The module `penstock.kernels.gpu.skinny_table` with this table."""
    source = Path(skinny_table.__file__).read_text()
    head = source[: source.index("\nTABLE") + 1]
    lines = [f"    {key!r}: {table[key]!r},".replace("'", '"') for key in sorted(table)]
    text = "\n".join(["TABLE: dict[Key, Entry | None] = {", *lines, "}", ""])
    path.write_text(head + text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS))
    parser.add_argument("--write", type=Path, metavar="FILE", help="the table's module")
    arguments = parser.parse_args()
    unique = dict.fromkeys(shape for size in arguments.sizes for shape in shapes(size))
    measured = list(itertools.product(unique, arguments.rows))
    compile_all(measured)
    workspace(torch.device("cuda", torch.cuda.current_device()))
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    table = dict(skinny_table.TABLE)
    print("| product | rows | cuBLAS µs | ours µs | config |")
    print("| --- | --: | --: | --: | --- |", flush=True)
    for size, rows in itertools.product(arguments.sizes, arguments.rows):
        found = tune_layers(size, rows, pool)
        logits = shapes(size)[-1]
        found[logits] = tune_logits(logits, rows, pool)
        for shape, config in found.items():
            table[(*shape, rows)] = None if config is None else (*config,)
        if arguments.write:
            write(arguments.write, table)


if __name__ == "__main__":
    main()
