"""Matrix products whose rows do not depend on how many there are.

A GEMM adds up the products of one output element in the order of the inner dimension, whatever the
number of rows, with two exceptions, measured with MKL 2024.2 (AVX-512, 1 and 2 threads): below 16
rows it takes other kernels, and a long inner dimension is cut into pieces whose length depends on
the number of rows and threads. So the rows are padded to 16, and the cutting is done here.
"""

from torch import Tensor
from torch.nn import functional

from penstock.kernels.checks import check_tensor

MIN_ROWS = 16
INNER_PIECE = 512


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`; x [num_rows, in_features], weight [out_features, in_features]."""
    check_tensor("x", x, (-1, -1))
    check_tensor("weight", weight, (-1, x.shape[1]), x.dtype)
    return _linear_reference(x, weight)


def _linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    num_rows, inner = x.shape
    if num_rows < MIN_ROWS:
        x = functional.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
    out = functional.linear(x[:, :INNER_PIECE], weight[:, :INNER_PIECE])
    for begin in range(INNER_PIECE, inner, INNER_PIECE):
        piece = slice(begin, begin + INNER_PIECE)
        out.addmm_(x[:, piece], weight[:, piece].t())
    return out[:num_rows]
