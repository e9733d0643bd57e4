"""Matrices in 8 bits (e4m3: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).

Each row has a scale of its own. The rows of a weight are output features, quantised once; those of
activations are tokens, quantised as they come.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.checks import check_contiguous, check_tensor
from penstock.kernels.norm import rms_norm

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448"""
SMALLEST = 1e-12
"""taken for a row's largest element at least, so that a row of zeros has a scale"""


@dataclass(frozen=True, slots=True)
class Quantized:
    """Row i is `values[i] * scale[i]`; or several such matrices, one behind the other."""

    values: Tensor
    """float8_e4m3fn [..., num_rows, num_columns]"""
    scale: Tensor
    """float32 [..., num_rows]"""

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

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice) -> "Quantized":
        """A view of one of the matrices, or of some of the first dimension."""
        return Quantized(self.values[index], self.scale[index])

    def split(self, sizes: list[int]) -> "list[Quantized]":
        """Views of so many rows each, of one matrix."""
        pairs = zip(torch.split(self.values, sizes), torch.split(self.scale, sizes), strict=True)
        return [Quantized(*pair) for pair in pairs]

    def copy_(self, other: Tensor) -> None:
        """Quantises `other` into this."""
        quantized = quantize(other.to(self.device).contiguous())
        self.values.copy_(quantized.values)
        self.scale.copy_(quantized.scale)


Matrix = Tensor | Quantized


def parts(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """Values, and the scales of its rows if it has some."""
    return (matrix.values, matrix.scale) if isinstance(matrix, Quantized) else (matrix, None)


def quantize(
    x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0, *, swiglu: bool = False
) -> Quantized:
    """x [num_rows, num_columns], or `rms_norm(x)`, or `silu_and_mul(x)`, each row by its largest.

    On a GPU x is contiguous and the result has at most 32768 columns.
    """
    check_tensor("x", x, (-1, -1))
    if x.is_cuda:
        from penstock.kernels.gpu import quantize

        check_contiguous("x", x)
        if norm_weight is not None:
            check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype)
        return Quantized(*quantize.quantize(x, norm_weight, eps, swiglu))
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    return _quantize_reference(silu_and_mul(x) if swiglu else x)


def _quantize_reference(x: Tensor) -> Quantized:
    scale = x.abs().amax(1).float().clamp(min=SMALLEST) / LARGEST
    return Quantized((x / scale[:, None]).to(FP8), scale)
