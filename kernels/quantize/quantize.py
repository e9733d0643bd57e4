"""Matrices in 8 bits (e4m3: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).

Each row has a scale of its own. The rows of a weight are output features, quantised once; those of
activations are tokens, quantised as they come. Weights that come in 8 bits (Qwen3-*-FP8) keep the
scales that they come with, of blocks of 128 by 128.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.checks import check_contiguous, check_tensor
from penstock.kernels.elementwise.activation import silu_and_mul
from penstock.kernels.elementwise.norm import rms_norm

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448"""
BLOCK = 128
"""rows, and columns, that share a scale where blocks have them"""
SMALLEST = 1e-12
"""taken for a row's largest element at least, so that a row of zeros has a scale"""


@dataclass(frozen=True, slots=True)
class Quantized:
    """Row i is `values[i] * scale[i]`, or each block has its scale; or several such matrices."""

    values: Tensor
    """float8_e4m3fn [..., num_rows, num_columns]"""
    scale: Tensor
    """float32 [..., num_rows]; or of blocks of 128 by 128, [..., row blocks, column blocks]"""

    @property
    def shape(self) -> torch.Size:
        """[..., num_rows, num_columns]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Of both parts."""
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        """Whether that is a GPU."""
        return self.values.is_cuda

    @property
    def in_blocks(self) -> bool:
        """Whether blocks have the scales, and not rows."""
        return self.scale.ndim == self.values.ndim

    def dequantized(self) -> Tensor:
        """What it stands for, float32."""
        if not self.in_blocks:
            return self.values.float() * self.scale[..., None]
        rows, columns = self.shape[-2:]
        wide = self.scale.repeat_interleave(BLOCK, -2)[..., :rows, :]
        return self.values.float() * wide.repeat_interleave(BLOCK, -1)[..., :columns]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice) -> "Quantized":
        """A view of one of the matrices, or of some of the first dimension: of whole blocks."""
        if self.in_blocks and self.values.ndim == 2 and isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            return Quantized(self.values[index], self.scale[begin // BLOCK : -(-end // BLOCK)])
        return Quantized(self.values[index], self.scale[index])

    def split(self, sizes: list[int]) -> "list[Quantized]":
        """Views of N rows each, of one matrix; where blocks have the scales, of whole ones."""
        bounds = [0, *accumulate(sizes)]
        return [self[begin:end] for begin, end in pairwise(bounds)]

    def copy_(self, other: "Matrix") -> None:
        """Quantises `other` into this, or copies it as it is quantised."""
        if isinstance(other, Tensor):
            other = other.to(self.device).contiguous()
            other = quantize_blocks(other) if self.in_blocks else quantize(other)
        self.values.copy_(other.values)
        self.scale.copy_(other.scale)


Matrix = Tensor | Quantized


def parts(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """Values, and the scales of its rows if it has some."""
    return (matrix.values, matrix.scale) if isinstance(matrix, Quantized) else (matrix, None)


def scale_shape(matrix: Quantized) -> tuple[int, ...]:
    """The shape that its scales must have: of rows, or of blocks."""
    *others, rows, columns = matrix.shape
    if matrix.in_blocks:
        return (*others, -(-rows // BLOCK), -(-columns // BLOCK))
    return (*others, rows)


def quantize(
    x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0, *, swiglu: bool = False
) -> Quantized:
    """x [num_rows, num_columns], or `rms_norm(x)`, or `silu_and_mul(x)`, each row by its largest.

    On a GPU x is contiguous and the result has at most 32768 columns.
    """
    check_tensor("x", x, (-1, -1))
    if x.is_cuda:
        from penstock.kernels.quantize import triton_quantize as quantize

        check_contiguous("x", x)
        if norm_weight is not None:
            check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype)
        return Quantized(*quantize.quantize(x, norm_weight, eps, swiglu))
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    return _quantize_reference(silu_and_mul(x) if swiglu else x)


def quantize_blocks(x: Tensor) -> Quantized:
    """x [num_rows, num_columns], each block of 128 by 128 by its largest number."""
    rows, columns = x.shape
    padded = functional.pad(x.float().abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK).amax((1, 3))
    scale = largest.clamp(min=SMALLEST) / LARGEST
    unit = Quantized(torch.ones_like(x), scale).dequantized()
    return Quantized((x / unit).to(FP8), scale)


def _quantize_reference(x: Tensor) -> Quantized:
    scale = x.abs().amax(1).float().clamp(min=SMALLEST) / LARGEST
    return Quantized((x / scale[:, None]).to(FP8), scale)
