"""Weights as integers of 8 or 4 bits with a scale for each group of columns, in the CPU's layout.

A group is 64 columns of a row. With 4 bits a byte has two columns of a group, 32 apart, so that
vectors of bytes become vectors of adjacent columns.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.cpu.values import Pointer, Value

GROUP = 64
BITS = {"q8": 8, "q4": 4}
"""by kind of matrix"""


class Integers(NamedTuple):
    """A matrix [num_rows, num_columns]: `codes * scale`."""

    codes: Tensor
    """int8 [num_rows, num_columns], or uint8 [num_rows, num_columns / 2]: codes plus 8"""
    scale: Tensor
    """float32 [num_rows, num_columns / GROUP]"""

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def shape(self) -> torch.Size:
        """[num_rows, num_columns]."""
        return torch.Size((len(self.scale), self.scale.shape[1] * GROUP))

    def __len__(self) -> int:
        return len(self.scale)

    def dequantized(self) -> Tensor:
        """Return the numbers, float32."""
        codes = self.codes.view(*self.scale.shape, -1)
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], -1).to(torch.int8) - 8
        return (codes.float() * self.scale[..., None]).flatten(1)


def quantize(weight: Tensor, bits: int) -> Integers:
    """Return the nearest integers of a matrix, whose columns are whole groups. Raises ValueError.

    The scale makes the number of the largest magnitude an end of the range: with 4 bits, -8.
    """
    if weight.shape[1] % GROUP:
        raise ValueError(f"columns: got {weight.shape[1]}, expected a multiple of {GROUP}")
    groups = weight.float().view(len(weight), -1, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = largest.abs() / 127 if bits == 8 else largest / -8
    codes = torch.where(scale == 0, 0, groups / scale).round()
    if bits == 8:
        return Integers(codes.to(torch.int8).flatten(1), scale[..., 0])
    nibbles = (codes.clamp(-8, 7) + 8).to(torch.uint8)
    low, high = nibbles[..., : GROUP // 2], nibbles[..., GROUP // 2 :]
    return Integers((low | high << 4).flatten(1), scale[..., 0])


class IntegerPointer:
    """A group in a matrix of `Integers`, in code that is being emitted."""

    def __init__(self, codes: Pointer, scales: Pointer, bits: int) -> None:
        """Point to the group that has these codes and this scale."""
        self.kind, self.bits = f"q{bits}", bits
        self.codes, self._scales = codes, scales

    def __add__(self, columns: "Value | int") -> "IntegerPointer":
        """Return a group after this one; columns: a multiple of GROUP."""
        codes, scales = self.codes + columns // (8 // self.bits), self._scales + columns // GROUP
        return IntegerPointer(codes, scales, self.bits)

    @property
    def scale(self) -> Value:
        return self._scales[0]

    def prefetch(self, columns: "Value | int") -> None:
        """Start to read the cache line of the codes after `columns`."""
        self.codes.prefetch(columns // (8 // self.bits))


def weight_pointer(weight: str, codes: Pointer, scales: Pointer) -> Any:
    """Return the pointer to a matrix of a kind: "f32", "bf16", "q8" or "q4"."""
    return IntegerPointer(codes, scales, BITS[weight]) if weight in BITS else codes
