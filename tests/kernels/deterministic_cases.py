"""Launches of the kernels of `--deterministic`, as `launch_cases`."""

from itertools import product

import torch

from tests.kernels import launch_cases as cases

SMALL = (("norm", 4096, 1024), ("add", 1024, 2048), ("swiglu", 6144, 1024), ("add", 1024, 3072))
"""products whose weights have four ranges (kind, rows of the weight, inner dimension)"""


def deterministic(is_fp8: bool) -> None:
    """Launch products and attention whose bits do not depend on other rows."""
    from penstock.kernels.deterministic.triton_attention import (
        FixedSplitDecode,
        fixed_split_prefill,
    )
    from penstock.kernels.deterministic.triton_linear import multiply
    from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch

    rows = 1, 16, 64, 200, 4096
    for (kind, num_weights, inner), number in product((*SMALL, *cases.PRODUCTS), rows):
        residual = cases.numbers(number, num_weights) if kind == "add" else None
        weight = cases.weight_of(is_fp8, num_weights, inner)
        norm_weight = None if kind == "add" else cases.numbers(inner)
        multiply(kind, cases.numbers(number, inner), weight, norm_weight, 0.0, residual)
    sizes = [(*sizes, cases.HEAD_DIM) for sizes in cases.ATTENTION]
    if not is_fp8:  # with which wide heads spill registers on a GPU of compute capability 9.0
        sizes.append((24, 4, 128, cases.WIDE_HEAD))
    for heads, kv_heads, block_size, head_dim in sizes:
        cases.decode(heads, kv_heads, block_size, 16, is_fp8, FixedSplitDecode, head_dim)
        cache = cases.cache_of(block_size, kv_heads, is_fp8, head_dim)
        q, one = cases.numbers(4096, heads, head_dim), cases.longs(1)
        for size in (64, 128):
            shape = BatchShape(4, 4096, 0, 64, size, 4096, 4096)
            fields = one, one, one, cases.ints(5), cases.ints(5), cases.ints(4), cases.ints(0)
            batch = ForwardBatch(shape, *fields, cases.ints(64, 2), cases.ints(4, 64))
            fixed_split_prefill(q, cache, batch, 0.1, torch.empty_like(q))
