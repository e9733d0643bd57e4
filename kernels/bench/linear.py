"""Products of few rows against cuBLAS with separate kernels; writes the fastest tile sizes.

    python -m penstock.kernels.bench.linear [--sizes 0.6B 8B] [--rows 1 16] [--write FILE | --cache]
        [--layer HIDDEN INTERMEDIATE HEADS KV_HEADS] [--tp N] [--dtype fp8] [--head]

The four products of a layer are tuned in turn, timed within a layer. The figures are those of the
whole layer, since the time of a product depends on its neighbors, such as a kernel that starts
early, a kernel that can't overlap, or an input that was just written. FILE is a table of
`kernels/linear/tuning`; other sizes and rows keep their entries. --cache writes the table of the
user's cache (`launch tune`). With fp8 the weights have 8 bits, and cuBLAS multiplies 8 bits.
"""

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.attention.triton_decode import DecodeAttention
from penstock.kernels.bench.timing import Configs, fastest_in_turn, graph_us, l2_bytes
from penstock.kernels.device import this_device
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear import linear
from penstock.kernels.linear.small_m_gemm import (
    EARLY,
    Product,
    empty_product,
    launch,
    workspace,
)
from penstock.kernels.linear.tile_sizes import (
    HEAD_DIM,
    PUBLISHED,
    SIZES,
    GemmConfig,
    GemmShape,
    candidates,
    row_block,
    shapes,
)
from penstock.kernels.linear.tuning_tables import (
    Origin,
    Tables,
    cached_table,
    decode,
    origin_of,
    packaged_tables,
    write,
)
from penstock.kernels.matrices import FP8, Quantized, Rows, parts

CONTEXT = 384  # tokens; the middle of a request with 256 input and 256 output tokens
BLOCK_SIZE = 128
EPS = 1e-6


def separately(product: Product, dtype: torch.dtype = torch.bfloat16) -> Rows:
    """Compute the product by cuBLAS, with separate kernels for norm, activation and sum."""
    if product.norm_weight is None:
        if product.residual is None:
            raise ValueError("product: got neither norm nor residual, expected one of them")
        return linear.add_separately(product.x, product.weight, product.residual)
    if product.swiglu:
        return linear.swiglu_separately(product.x, product.norm_weight, EPS, product.weight)
    return linear.norm_separately(product.x, product.norm_weight, EPS, product.weight, dtype)


def cut(pool: Tensor, shape: GemmShape, begin: int = 0) -> Rows:
    """Return a weight cut from the pool at `begin`, as a Quantized if the pool has 8 bits."""
    values = pool[begin : begin + shape.num_weights * shape.inner].view(-1, shape.inner)
    if pool.dtype != FP8:
        return values
    return Quantized(values, torch.full((len(values),), 0.02, device=pool.device))


class Layers:
    """Decoding layers of one published size for `rows` rows, with weights beyond the L2 cache."""

    def __init__(self, size: str, rows: int, pool: Tensor) -> None:
        """Cut the weights from `pool`, random numbers in bfloat16 or 8 bits."""
        hidden, _, self.heads, self.kv_heads = SIZES[size]
        self.shapes = shapes(size)[:4]
        num_weights = sum(shape.num_weights * shape.inner for shape in self.shapes)
        self.num_layers = max(2, -(-4 * l2_bytes() // (num_weights * pool.itemsize)))
        self.weights = _cut_all(pool, self.shapes * self.num_layers)
        self.x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
        self.norm_weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        self.head_norm = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.rope = torch.randn(CONTEXT, HEAD_DIM, device="cuda")
        blocks = -(-CONTEXT // BLOCK_SIZE)
        shape = (self.num_layers, 2, rows * blocks, BLOCK_SIZE, self.kv_heads, HEAD_DIM)
        self.kv_cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.tables = torch.arange(rows * blocks, dtype=torch.int32, device="cuda").view(rows, -1)
        self.positions = torch.full((rows,), CONTEXT - 1, device="cuda")
        self.slots = self.tables[:, -1].long() * BLOCK_SIZE + (CONTEXT - 1) % BLOCK_SIZE
        self.context_lens = torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda")
        layout = (rows, self.heads, self.kv_heads, HEAD_DIM, BLOCK_SIZE, "cuda")
        self.attention = DecodeAttention(*layout)
        self.attention.plan(self.context_lens)
        torch.cuda.synchronize()

    def us(self, configs: Configs) -> float:
        """Return the microseconds of a layer; None as a config stands for cuBLAS."""
        return graph_us([lambda: self.run(configs)], 3, 400) / self.num_layers

    def run(self, configs: Configs) -> Tensor:
        residual = self.x.clone()  # cuBLAS changes it in place
        for layer in range(self.num_layers):
            qkv_proj, o_proj, gate_up_proj, down_proj = self.weights[4 * layer : 4 * layer + 4]
            qkv, o, gate_up, down = (configs[shape] for shape in self.shapes)
            heads = self._multiply(qkv, "norm", residual, qkv_proj)
            attended = self._attend(heads, layer)
            residual = self._multiply(o, "add", attended, o_proj, residual)
            activated = self._multiply(gate_up, "swiglu", residual, gate_up_proj)
            residual = self._multiply(down, "add", activated, down_proj, residual)
        return residual

    def _multiply(
        self,
        config: GemmConfig | None,
        kind: str,
        x: Tensor,
        weight: Rows,
        residual: Tensor | None = None,
    ) -> Tensor:
        norm_weight = self.norm_weight if residual is None else None
        product = empty_product(kind, x, weight, norm_weight, EPS, residual)
        if config is None:
            return parts(separately(product))[0]
        launch(product, config)
        return product.out

    def _attend(self, qkv: Tensor, layer: int) -> Tensor:
        kv_cache = KVCache(*self.kv_cache[layer])
        q = qk_norm_rope_store(
            qkv,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            q_weight=self.head_norm,
            k_weight=self.head_norm,
            rope=self.rope,
            positions=self.positions,
            slot_mapping=self.slots,
            kv_cache=kv_cache,
            eps=EPS,
        )
        out = torch.empty_like(q)
        lengths = {"context_lens": self.context_lens, "block_tables": self.tables}
        self.attention(q, kv_cache, **lengths, scale=HEAD_DIM**-0.5, out=out)
        return out.flatten(1)


def _cut_all(pool: Tensor, wanted: list[GemmShape]) -> list[Rows]:
    """Return adjacent weights cut from the pool; they wrap around at its end."""
    begin, weights = 0, []
    for shape in wanted:
        size = shape.num_weights * shape.inner
        begin = begin if begin + size <= len(pool) else 0
        weights.append(cut(pool, shape, begin))
        begin += size
    return weights


ROWS = (1, 16, 32, 64)
MAX_ERROR = 1e-2
NUM_PROCESSES = min(16, len(os.sched_getaffinity(0)))
POOL = 1 << 30  # random elements from which all shapes are cut; more than the largest shape needs


def operands(shape: GemmShape, rows: int, weight: Rows) -> Product:
    """Return the operands of a product of this weight with random x, norm weight and residual."""
    x, norm_weight, residual = (
        numbers.to("cuda", torch.bfloat16)
        for numbers in (
            torch.randn(rows, shape.inner),
            torch.rand(shape.inner) + 0.5,
            torch.randn(rows, shape.num_columns),
        )
    )
    if shape.kind == "add":
        return empty_product(shape.kind, x, weight, residual=residual)
    return empty_product(shape.kind, x, weight, norm_weight, EPS)


def expected(product: Product) -> Tensor:
    """Compute the product in float32."""
    x = product.x.float()
    if product.norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * product.norm_weight.float()
    weight, scale = parts(product.weight)
    out = torch.cat([x @ some.float().T for some in torch.split(weight, 1 << 14)], -1)
    if scale is not None:
        out *= scale
    if product.swiglu:
        gate, up = out.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return out if product.residual is None else out + product.residual.float()


def compile_some(dtype: torch.dtype, work: Sequence[tuple[GemmShape, int, GemmConfig]]) -> int:
    """Fill Triton's cache on disk by running kernels; return the number that failed."""
    failed = 0
    for shape, rows, config in work:
        weights = torch.zeros(shape.num_weights * shape.inner, dtype=dtype, device="cuda")
        try:
            launch(operands(shape, rows, cut(weights, shape)), config)
        except TritonError:
            failed += 1
    torch.cuda.synchronize()
    return failed


def compile_all(measured: Sequence[tuple[GemmShape, int]], dtype: torch.dtype) -> None:
    """Compile every kernel once, in one process per core: N and K are not constants."""
    unique: dict[object, tuple[GemmShape, int, GemmConfig]] = {}
    for shape, rows in measured:
        for candidate in candidates(shape, rows, dtype.itemsize):
            small = _small(shape, candidate, dtype)
            config = candidate._replace(split_k=min(candidate.split_k, 2))  # not a constant either
            small = small._replace(inner=small.inner // candidate.split_k * config.split_k)
            block = row_block(rows)
            fewest = 1 if rows == 1 else block // 2 + 1  # minimum rows that use this block
            unique.setdefault((small, block, config), (small, fewest, config))
    work = list(unique.values())
    begin = time.monotonic()
    shares = [work[first::NUM_PROCESSES] for first in range(NUM_PROCESSES)]
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn")) as pool:
        failed = sum(pool.map(partial(compile_some, dtype), shares))
    print(
        f"{len(work)} kernels compiled in {time.monotonic() - begin:.0f} s, {failed} need too much",
        flush=True,
    )


def _small(shape: GemmShape, config: GemmConfig, dtype: torch.dtype) -> GemmShape:
    """Return a small shape that compiles to the same kernel."""
    inner = config.bk if shape.inner % config.bk == 0 else config.bk - 16
    if -(-shape.inner // config.bk) > config.split_k:  # otherwise one tile suffices
        inner += config.bk
    inner *= config.split_k
    most = EARLY // dtype.itemsize
    is_large = shape.num_weights * shape.inner > most
    return GemmShape(shape.kind, 256 * (1 + is_large * most // (256 * inner)), inner)


def is_right(first: Product, config: GemmConfig, wanted: Tensor) -> bool:
    """Return True if the result is right; False if it is wrong or shared memory is too small."""
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


def right_candidates(shape: GemmShape, rows: int, pool: Tensor) -> list[GemmConfig]:
    """Return the candidates that compute the right result."""
    first = operands(shape, rows, cut(pool, shape))
    wanted = expected(first)
    ways = candidates(shape, rows, pool.itemsize)
    return [config for config in ways if is_right(first, config, wanted)]


def tune_layers(size: str, rows: int, pool: Tensor) -> Configs:
    """Tune the products of a layer in turn."""
    layers = Layers(size, rows, pool)
    right = partial(right_candidates, rows=rows, pool=pool)
    configs, separate, best = fastest_in_turn(layers.shapes, right, layers.us)
    print(f"| {size} layer | {rows} | {separate:.1f} | {best:.1f} | |", flush=True)
    for shape, chosen in configs.items():
        print(f"| {_name(shape)} | {rows} | | | {_readable(chosen)} |", flush=True)
    return configs


def tune_logits(shape: GemmShape, rows: int, pool: Tensor) -> GemmConfig | None:
    """Return the fastest tile sizes, or None if cuBLAS is faster."""
    product = operands(shape, rows, cut(pool, shape))
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


def _name(shape: GemmShape) -> str:
    return f"{shape.kind} {shape.inner}→{shape.num_weights}"


def _readable(config: GemmConfig | None) -> str:
    return "cuBLAS" if config is None else " ".join(map(str, config))


class Output(NamedTuple):
    """Path of the tables to be written, and the tables already in the file."""

    path: Path | None
    origin: Origin | None
    tables: Tables

    def write(self) -> None:
        if self.path:
            write(self.path, self.tables, self.origin)


def output_of(path: Path | None, in_cache: bool) -> Output:
    """Return the output; entries of an earlier run are kept if they are still valid."""
    tables: Tables = {"bfloat16": {}, "fp8": {}}
    if not in_cache:
        return Output(
            path, None, tables | (packaged_tables(path) if path and path.exists() else {})
        )
    device = this_device()
    path, origin = cached_table(device.name), origin_of(device)
    with suppress(OSError, ValueError):
        tables |= decode(path.read_bytes(), origin)
    return Output(path, origin, tables)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(PUBLISHED))
    parser.add_argument("--layer", nargs=4, type=int, metavar="N", help="a rank's sizes of a layer")
    parser.add_argument("--tp", type=int, default=1, help="parts of the vocabulary with --layer")
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS))
    parser.add_argument("--write", type=Path, metavar="FILE", help="a table of this package")
    parser.add_argument("--cache", action="store_true", help="write the user's table of this GPU")
    parser.add_argument("--dtype", choices=["bfloat16", "fp8"], default="bfloat16")
    parser.add_argument("--head", action="store_true", help="only the logits, not the layers")
    return parser.parse_args()


def main() -> None:
    """Tune the products of the given sizes."""
    arguments = _arguments()
    if arguments.layer:
        hidden, intermediate, heads, kv_heads = arguments.layer
        arguments.sizes = [f"model/{arguments.tp}"]
        SIZES[arguments.sizes[0]] = hidden, intermediate, heads, kv_heads
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    if arguments.dtype == "fp8":
        pool = pool.mul_(50).to(FP8)
    unique = dict.fromkeys(
        shape for size in arguments.sizes for shape in shapes(size)[4 * arguments.head :]
    )
    compile_all(list(itertools.product(unique, arguments.rows)), pool.dtype)
    workspace(torch.device("cuda", torch.cuda.current_device()))
    output = output_of(arguments.write, arguments.cache)
    table = output.tables[arguments.dtype]
    print("| product | rows | cuBLAS µs | ours µs | config |")
    print("| --- | --: | --: | --: | --- |", flush=True)
    for size, rows in itertools.product(arguments.sizes, arguments.rows):
        found = {} if arguments.head else tune_layers(size, rows, pool)
        logits = shapes(size)[-1]
        found[logits] = tune_logits(logits, rows, pool)
        for shape, config in found.items():
            table[(*shape, rows)] = config
        output.write()
    if output.path:
        print(f"{len(table)} tile sizes in {output.path}; workers read them when they start")


if __name__ == "__main__":
    main()
