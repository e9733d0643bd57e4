"""Products with weights of 8 bits, whose rows or blocks have scales: time, and error.

    python -m tests.gpu.block_scales [--sizes 8B] [--rows 1 16 64 256 2048]

The error is that against float32 with what the weights stand for, so that it is of activations in
8 bits, of sums, and of the result's rounding. Ways of many rows are measured with few as well.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.bench.timing import graph_us, l2_bytes
from penstock.kernels.elementwise import quantize, quantize_blocks
from penstock.kernels.linear.small_m_gemm import MAX_ROWS, choose, empty_product, launch
from penstock.kernels.linear.tile_sizes import PUBLISHED, SIZES, shapes
from penstock.kernels.linear.triton_fp8_gemm import block_product
from penstock.kernels.matrices import BLOCK, Matrix, Quantized

ROWS = (1, 16, 64, 256, 2048)
Way = Callable[[Tensor, Quantized, Quantized], object]


def fused(x: Tensor, weight: Matrix) -> Tensor | None:
    """By our kernel of few rows."""
    config = choose("add", len(x), len(weight), x.shape[1], isinstance(weight, Quantized))
    if config is None:
        raise ValueError("cuBLAS is faster")
    product = empty_product("add", x, weight)
    launch(product, config)
    return product.out


def scaled_mm(x: Tensor, weight: Quantized, fast: bool) -> Tensor:
    """By cuBLAS, with scales of rows; fast: sums of fewer bits within tensor cores."""
    narrow = quantize(x)
    scales = narrow.scale[:, None], weight.scale[None]
    return torch._scaled_mm(
        narrow.values, weight.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def scaled_mm_blocks(x: Tensor, weight: Quantized) -> Tensor:
    """By cuBLAS, with scales of blocks, and of 128 columns of a row of x."""
    num_rows, inner = x.shape
    groups = quantize(x.view(-1, BLOCK))
    x_scale = groups.scale.view(num_rows, -1).t().contiguous().t()
    return torch._scaled_mm(
        groups.values.view(num_rows, inner),
        weight.values.t(),
        x_scale,
        weight.scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


WAYS: dict[str, Way] = {
    "ours, rows": lambda x, rows, _: fused(x, rows),
    "ours, blocks": lambda x, _, blocks: fused(x, blocks),
    "cuBLAS, rows, fast": lambda x, rows, _: scaled_mm(x, rows, True),
    "cuBLAS, rows": lambda x, rows, _: scaled_mm(x, rows, False),
    "Triton, blocks": lambda x, _, blocks: block_product(quantize(x), blocks),
    "cuBLAS, blocks": lambda x, _, blocks: scaled_mm_blocks(x, blocks),
    "16 bits": lambda x, _, blocks: torch.mm(x, blocks.dequantized().to(x.dtype).t()),
}


def measure(rows: int, num_columns: int, inner: int) -> None:
    """Print a line for each way."""
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    copies = 1 + 2 * l2_bytes() // (num_columns * inner)
    originals = [torch.randn(num_columns, inner, device="cuda") for _ in range(copies)]
    blocks = [quantize_blocks(one) for one in originals]
    by_rows = [quantize(one.dequantized()) for one in blocks]  # what FP8 checkpoints became before
    exact = x.float() @ originals[0].t()
    kept = x.float() @ blocks[0].dequantized().t()
    for name, way in WAYS.items():
        if name.startswith("ours") and rows > MAX_ROWS:
            continue
        try:
            out = way(x, by_rows[0], blocks[0])
            pairs = zip(by_rows, blocks, strict=True)
            us = graph_us([partial(way, x, *pair) for pair in pairs])
        except (RuntimeError, ValueError) as error:
            print(f"| {inner}→{num_columns} | {rows} | {name} | {str(error).splitlines()[0]} | | |")
            continue
        errors = [relative_error(out, wanted) for wanted in (kept, exact)]
        figures = " | ".join(f"{error:.4f}" for error in errors)
        print(f"| {inner}→{num_columns} | {rows} | {name} | {us:.1f} | {figures} |", flush=True)


def relative_error(out: object, wanted: Tensor) -> float:
    """Norm of the error, by that of what is wanted."""
    if not isinstance(out, Tensor):
        raise TypeError(f"a product is {type(out)}")
    return float((out.float() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(PUBLISHED)[-2:])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print("| product | rows | way | µs | error | error against the original weights |")
    print("| --- | --: | --- | --: | --: | --: |", flush=True)
    for size, rows in itertools.product(arguments.sizes, arguments.rows):
        for shape in shapes(size)[:4]:
            measure(rows, shape.num_weights, shape.inner)


if __name__ == "__main__":
    main()
