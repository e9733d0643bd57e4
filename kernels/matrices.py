"""Matrices in 8 bits (e4m3: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).

Each row has a scale. The rows of a weight are output features, quantized once. The rows of
activations are tokens, quantized in each step. Weights of Qwen3-*-FP8 checkpoints keep the scales
of their blocks of 128 by 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
BLOCK = 128  # rows and columns of a block with one scale
SMALLEST = 1e-12  # lower bound of a row's largest element, so that a row of zeros has a scale


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized matrices: row i is `values[i] * scale[i]`, or each block has a scale."""

    values: Tensor  # float8_e4m3fn [..., num_rows, num_columns]
    # float32 [..., num_rows], or for blocks of 128 by 128 [..., row blocks, column blocks]
    scale: Tensor
    # dtype of activations before quantization, and of products with the matrix
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        """[..., num_rows, num_columns]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def in_blocks(self) -> bool:
        return self.scale.ndim == self.values.ndim

    def dequantized(self) -> Tensor:
        if not self.in_blocks:
            return self.values.float() * self.scale[..., None]
        rows, columns = self.shape[-2:]
        wide = self.scale.repeat_interleave(BLOCK, -2)[..., :rows, :]
        return self.values.float() * wide.repeat_interleave(BLOCK, -1)[..., :columns]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice) -> "Quantized":
        """Return a view of one matrix, or of a range of rows of whole blocks."""
        if self.in_blocks and self.values.ndim == 2 and isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            return Quantized(self.values[index], self.scale[begin // BLOCK : -(-end // BLOCK)])
        return Quantized(self.values[index], self.scale[index])

    def split(self, sizes: list[int]) -> "list[Quantized]":
        """Return views of N rows each; with block scales, N must be whole blocks."""
        return [self[begin:end] for begin, end in pairwise([0, *accumulate(sizes)])]


Rows = Tensor | Quantized  # activations, or a weight that is not packed


class CustomMatrix(Protocol):
    """Weight in a format defined by an extra, with the products that support it."""

    @property
    def shape(self) -> torch.Size:
        """[..., num_rows, num_columns]."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_cuda(self) -> bool: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int | slice) -> "CustomMatrix":
        """Return a view of one matrix, or of a range of rows of a matrix."""

    def split(self, sizes: list[int]) -> "Sequence[CustomMatrix]":
        """Return views of N rows of a matrix."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the weight has this shape (-1: any size)."""

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a matrix, rounded once."""

    def multiply(
        self,
        kind: str,
        x: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor | None:
        """Compute `penstock.kernels.linear.small_m_gemm.multiply`; None if `rounded` is faster."""

    def pairs_of_tile(self, num_pairs: int, num_experts: int) -> int:
        """Return the number of (token, expert) pairs in a tile of `grouped`."""

    def grouped(self, x: Tensor, sources: Tensor, tiles: Tensor, swiglu: bool, bm: int) -> Tensor:
        """Compute `penstock.kernels.triton_moe.grouped` with tiles of bm pairs."""


Matrix = Rows | CustomMatrix


def parts(matrix: Rows) -> tuple[Tensor, Tensor | None]:
    """Return the values, and the scales of a `Quantized` or None."""
    return (matrix.values, matrix.scale) if isinstance(matrix, Quantized) else (matrix, None)


def scale_shape(matrix: Quantized) -> tuple[int, ...]:
    """Return the required shape of the scales of rows or of blocks."""
    *others, rows, columns = matrix.shape
    if matrix.in_blocks:
        return (*others, -(-rows // BLOCK), -(-columns // BLOCK))
    return (*others, rows)
