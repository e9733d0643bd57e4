"""Matrix products on a CPU that are batch invariant: a row's bits do not depend on other rows.

BLAS documents no order of summation. Depending on the CPU, MKL 2024.2 adds in a different order for
few rows or columns, for sizes that are not multiples of its tiles, and for a long inner dimension.
The inner dimension is therefore cut into pieces, which are added in turn. Rows, columns and pieces
are padded to multiples of 16, and a call has up to 256 rows.

Each process checks the invariance before the first product: it multiplies rows alone and together.
If bits differ, every call with a weight has the same shape.
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

ALIGNMENT = 16
INNER_PIECE = 512
# maximum rows of one call if the check passes; otherwise 16, or one row padded to 16
MAX_ROWS = 256
# inner dimension and columns
PROBED_SHAPES = [(16, 16), (16, 1024), (64, 48), (80, 16), (512, 16), (512, 80), (128, 1024)]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight.T` in x's dtype; x: [num_rows, inner]; weight: [num_columns, inner]."""
    return _product(x, weight, _rows_of_call(torch.get_num_threads()))


def batched_product(x: Tensor, y: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Compute `out[:] = x @ y`, or with `add` the sum of both.

    x: [batch, num_rows, inner]. y: [batch, inner, num_columns]. out: [batch, num_rows,
    num_columns]. num_rows is a multiple of 8; inner and num_columns should be multiples of 16, up
    to 512. The product is not batch invariant on a GPU.
    """
    rows_of_call = MAX_ROWS if x.is_cuda else _rows_of_call(torch.get_num_threads())
    _batched_product(x, y, out, add, rows_of_call)


def pad_rows(x: Tensor, alignment: int) -> Tensor:
    """Return x padded with rows of zeros (dimension -2) to a multiple of `alignment`."""
    missing = -x.shape[-2] % alignment
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def _product(x: Tensor, weight: Tensor, rows_of_call: int) -> Tensor:
    if rows_of_call < ALIGNMENT:
        return torch.cat([_product(row, weight, ALIGNMENT) for row in torch.split(x, 1)])
    (num_rows, inner), num_columns = x.shape, len(weight)
    x = pad_rows(x, ALIGNMENT)
    if inner <= INNER_PIECE and len(x) <= rows_of_call and not (inner | num_columns) % ALIGNMENT:
        return torch.mm(x, weight.to(x.dtype).t())[:num_rows]  # the usual case, in one call
    out = x.new_empty(len(x), num_columns + -num_columns % ALIGNMENT)
    for columns in _cut(num_columns, num_columns):
        for piece in _cut(inner, INNER_PIECE):
            y = pad_rows(_pad_inner(weight[columns, piece].to(x.dtype)), ALIGNMENT).t()
            x_piece = _pad_inner(x[:, piece])
            sums = out[:, columns.start : columns.start + y.shape[1]]
            for begin in range(0, len(x), rows_of_call):
                rows = slice(begin, begin + rows_of_call)
                sums[rows].addmm_(x_piece[rows], y, beta=1 if piece.start else 0)
    return out[:num_rows, :num_columns].contiguous()


@cache
def _cut(size: int, longest: int) -> list[slice]:
    """Return slices of `longest` elements, of a multiple of 16, and of the remainder."""
    even = size - size % ALIGNMENT
    bounds = [*range(0, even, longest), even, size]
    return [slice(begin, end) for begin, end in pairwise(bounds) if begin < end] or [slice(0, 0)]


def _pad_inner(x: Tensor) -> Tensor:
    missing = -x.shape[1] % ALIGNMENT
    return functional.pad(x, (0, missing)) if missing else x


def _batched_product(x: Tensor, y: Tensor, out: Tensor, add: bool, rows_of_call: int) -> None:
    if rows_of_call == MAX_ROWS:
        torch.baddbmm(out, x, y, beta=1 if add else 0, out=out)
        return
    for x_item, y_item, out_item in zip(x, y, out, strict=True):
        product = _product(x_item, y_item.t(), rows_of_call)
        torch.add(out_item, product, out=out_item) if add else out_item.copy_(product)


@cache
def _rows_of_call(_num_threads: int) -> int:
    """Return the maximum number of rows of one call."""
    return next(rows for rows in (MAX_ROWS, ALIGNMENT, 1) if rows == 1 or _holds(rows))


def _holds(rows_of_call: int) -> bool:
    """Return True if rows have the same bits alone and in a batch, in the probed shapes."""
    most, generator = MAX_ROWS + ALIGNMENT, torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    for inner, num_columns in PROBED_SHAPES:
        x, weight = random(2, most, inner), random(2, num_columns, inner)
        y = weight.transpose(1, 2)
        together = _product(x[0], weight[0], rows_of_call)
        batch = x.new_zeros(2, most, num_columns)
        _batched_product(x, y, batch, True, rows_of_call)
        for num_rows in (8, 24, 80):
            for begin in (0, 3, most - num_rows):
                rows = slice(begin, begin + num_rows)
                some = batch.new_zeros(2, num_rows, num_columns)
                _batched_product(x[:, rows], y, some, True, rows_of_call)
                alone = _product(x[0, rows], weight[0], rows_of_call)
                if not (torch.equal(alone, together[rows]) and torch.equal(some, batch[:, rows])):
                    return False
    return True
