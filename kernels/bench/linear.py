"""Products of few rows against cuBLAS with separate kernels; writes the table of the fastest ones.

    python -m penstock.kernels.bench.linear [--sizes 0.6B 8B] [--rows 1 16] [--write FILE]

Shares are of what a copy on an H200 reads and writes per second. Sizes and rows that were not
measured keep their entries in FILE, as far as it is the table in use.
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
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from penstock.kernels import linear
from penstock.kernels.bench.timing import L2_BYTES, graph_us
from penstock.kernels.gpu import skinny_table
from penstock.kernels.gpu.skinny import Config, Product, empty_product, launch, row_block, workspace

SIZES = {
    "0.6B": (1024, 3072, 16, 8),
    "1.7B": (2048, 6144, 16, 8),
    "4B": (2560, 9728, 32, 8),
    "8B": (4096, 12288, 32, 8),
    "14B": (5120, 17408, 40, 8),
    "32B": (5120, 25600, 64, 8),
}
"""hidden size, intermediate size, heads, key-value heads of the published Qwen3"""
HEAD_DIM = 128
VOCAB_SIZE = 151936
ROWS = (1, 16, 32, 64)
COPY_BYTES_PER_US = 4.26e6
SHARED_BYTES = 220 << 10
NUM_SMS = 132
EPS = 1e-6
MAX_ERROR = 1e-2
FINALISTS = 3
"""are measured again, for longer"""
NUM_PROCESSES = min(16, os.cpu_count() or 1)
POOL = 1 << 30
"""random weights that all shapes are cut from, more than the largest has"""


class Shape(NamedTuple):
    """A weight [num_weights, inner]."""

    kind: str
    num_weights: int
    inner: int

    @property
    def weights_per_column(self) -> int:
        return 2 if self.kind == "swiglu" else 1

    @property
    def num_columns(self) -> int:
        return self.num_weights // self.weights_per_column


def shapes(size: str) -> list[Shape]:
    """The four products of a layer, and the logits."""
    hidden, intermediate, heads, kv_heads = SIZES[size]
    return [
        Shape("norm", (heads + 2 * kv_heads) * HEAD_DIM, hidden),
        Shape("add", hidden, heads * HEAD_DIM),
        Shape("swiglu", 2 * intermediate, hidden),
        Shape("add", hidden, intermediate),
        Shape("logits", VOCAB_SIZE, hidden),
    ]


def candidates(shape: Shape, rows: int) -> list[Config]:
    """Worth measuring: enough programs for all SMs, enough bytes in flight, and they fit."""
    tensor_cores = [config for config in _tensor_cores(shape, rows) if _fits(shape, rows, config)]
    if rows > 1:
        return tensor_cores
    return _gemvs(shape) + [one for one in tensor_cores if one.kernel == "slices"]


def _tensor_cores(shape: Shape, rows: int) -> list[Config]:
    splits = (1,) if shape.kind == "logits" else (1, 2, 3, 4, 6, 8)
    kernels = [("slices", 256, 4), ("slices", 512, 4), ("slices", 512, 8)] if rows <= 16 else []
    kernels += [("mma", 128, 4), ("mma", 256, 4)]
    if rows > 16:
        kernels += [("mma", 64, 4), ("mma", 128, 8)]
    return [
        Config(kernel, bn, bk, split_k, num_warps, num_stages, prefetch)
        for (kernel, bk, num_warps), bn, split_k, (num_stages, prefetch) in itertools.product(
            kernels, (8, 16, 32, 64, 128), splits, ((3, 0), (3, 512), (5, 512))
        )
    ]


def _fits(shape: Shape, rows: int, config: Config) -> bool:
    programs = -(-shape.num_columns // config.bn) * config.split_k
    if shape.inner % config.bk or config.bk * config.split_k > shape.inner:
        return False
    if not 100 <= programs <= max(600, shape.num_columns // 32):
        return False
    # A program whose share of the inner dimension is short needs no deep pipeline, and what
    # repeats x for few columns reads more of x than of weights.
    steps = shape.inner // config.bk // config.split_k
    if (config.num_stages == 5 and steps < 4) or config.bn * 4 < row_block(rows):
        return False
    weights = config.bn * shape.weights_per_column
    tile = config.bk * 2 * (row_block(rows) + weights)
    # At most this many programs have their tiles on one SM at once.
    resident = min(-(-programs // NUM_SMS), SHARED_BYTES // (tile * config.num_stages))
    in_flight = resident * config.bk * 2 * weights * min(config.num_stages - 1, steps)
    return resident > 0 and in_flight >= min(24 << 10, _share_of_sm(shape) // 2)


def _share_of_sm(shape: Shape) -> int:
    return 2 * shape.num_weights * shape.inner // NUM_SMS


def _gemvs(shape: Shape) -> list[Config]:
    whole = 1 << (shape.inner - 1).bit_length()
    configs = []
    for bn, num_warps in itertools.product((1, 2, 4, 8, 16), (2, 4, 8)):
        per_thread = bn * whole * shape.weights_per_column // (32 * num_warps)
        if 16 <= per_thread <= 128 and whole >= num_warps * 256:
            configs.append(Config("gemv", bn, whole, 1, num_warps, 1, 0))
    for bn, bk, num_stages, prefetch in itertools.product((4, 8), (512, 1024), (3, 5), (0, 512)):
        if shape.inner > bk:
            configs.append(Config("gemv", bn, bk, 1, 4, num_stages, prefetch))
    return configs


def operands(shape: Shape, rows: int, weight: Tensor) -> Product:
    """Random x, norm weight and residual for this weight."""
    x = torch.randn(rows, shape.inner).to(weight)
    norm_weight = (torch.rand(shape.inner) + 0.5).to(weight)
    residual = torch.randn(rows, shape.num_columns).to(weight)
    if shape.kind == "add":
        return empty_product(shape.kind, x, weight, residual=residual)
    return empty_product(shape.kind, x, weight, norm_weight, EPS)


def separately(shape: Shape, product: Product) -> Tensor:
    """By cuBLAS, with kernels of their own for what stands around it."""
    if product.residual is not None:
        return linear.add_separately(product.x, product.weight, product.residual)
    norm_weight = product.norm_weight
    if norm_weight is None:
        raise ValueError(f"{shape.kind} needs a norm weight")
    if product.swiglu:
        return linear.swiglu_separately(product.x, norm_weight, EPS, product.weight)
    dtype = product.out.dtype
    return linear.norm_separately(product.x, norm_weight, EPS, product.weight, dtype)


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
            config = candidate._replace(split_k=min(candidate.split_k, 2))  # no constant either
            small = _small(shape, config)
            key = (small, row_block(rows, config.kernel), config)
            unique.setdefault(key, (small, rows, config))
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
    if shape.inner > config.bk:
        inner = inner + config.bk
    return Shape(shape.kind, 256, inner * config.split_k)


def cut(pool: Tensor, shape: Shape) -> list[Tensor]:
    """As many weights as fill twice the L2, from the pool."""
    size = shape.num_weights * shape.inner
    number = min(64, max(1, -(-2 * L2_BYTES // (2 * size))), len(pool) // size)
    return [pool[i * size : (i + 1) * size].view(-1, shape.inner) for i in range(number)]


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


def best_of(shape: Shape, rows: int, pool: Tensor) -> skinny_table.Entry | None:
    """Prints a line; None if cuBLAS is faster."""
    weights = cut(pool, shape)
    first = operands(shape, rows, weights[0])
    products = [first._replace(weight=weight) for weight in weights]
    wanted = expected(first)
    calls: dict[Config, list[partial[None]]] = {
        config: [partial(launch, product, config) for product in products]
        for config in candidates(shape, rows)
        if is_right(first, config, wanted)
    }
    short = {config: graph_us(work, repeats=3, min_us=200) for config, work in calls.items()}
    if not short:
        raise RuntimeError(f"no kernel of ours runs {shape} with {rows} rows")
    finalists = sorted(short, key=lambda config: short[config])[:FINALISTS]
    times = {config: graph_us(calls[config]) for config in finalists}
    config = min(times, key=lambda config: times[config])
    separate = graph_us([partial(separately, shape, product) for product in products])
    share = 2 * shape.num_weights * shape.inner / times[config] / COPY_BYTES_PER_US
    print(
        f"| {shape.kind} {shape.inner}→{shape.num_weights} | {rows} | {separate:.1f} "
        f"| {times[config]:.1f} | {share:.0%} | {' '.join(map(str, config))} |",
        flush=True,
    )
    return (*config,) if times[config] < separate else None


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
    print("| product | rows | cuBLAS µs | ours µs | of a copy | config |")
    print("| --- | --: | --: | --: | --: | --- |", flush=True)
    for shape, rows in measured:
        table[(*shape, rows)] = best_of(shape, rows, pool)
        if arguments.write:
            write(arguments.write, table)


if __name__ == "__main__":
    main()
