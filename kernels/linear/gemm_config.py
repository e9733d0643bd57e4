"""Tile sizes of products of up to 64 rows, and their limits."""

from typing import NamedTuple

MAX_ROWS = 64
MAX_PARTIALS = 8 << 20  # float32 sums of all splits of a product (32 MB)


class GemmConfig(NamedTuple):
    """Tile sizes of a product: an entry of a tuning table."""

    # mma: tensor cores, warps divide the columns; slices: tensor cores, warps divide each bk of the
    # inner dimension; ranges: four warps divide all of it, a multiple of bk; gemv: for one row
    kernel: str
    bn: int  # columns of the result per program
    bk: int  # elements of the inner dimension per iteration of all warps
    split_k: int  # ranges of the inner dimension, up to MAX_SPLIT_K
    num_warps: int
    num_stages: int
    # elements of each weight row, in equal shares of its ranges, fetched into the L2 before the
    # previous kernels end: a power of two from 64 on, or 0. A program with one tile reads it early
    prefetch: int
    # the product computes the norm, which gemv always does; otherwise a separate kernel does
    norm_inside: bool = False


# (kind, rows of the weight, inner dimension, rows of x up to) → None: cuBLAS is faster
Table = dict[tuple[str, int, int, int], GemmConfig | None]


def row_block(num_rows: int) -> int:
    """Return the rows of a tensor core tile: 16, 32 or 64."""
    return max(16, 1 << (num_rows - 1).bit_length())
