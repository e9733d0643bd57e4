"""Weights as integers of 8 or 4 bits with scales of groups of columns, in the layout of a CPU.

A unit is 64 columns of a row. With 4 bits a byte has two columns of a unit, 32 apart, so that
vectors of bytes become vectors of adjacent columns.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

UNIT = 64  # columns
MAX_GROUP = 128  # columns of a group; larger groups are stored as several
MIN_GROUP = 32


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix [num_rows, num_columns]: `codes * scale`, plus a shift for each group if it has."""

    # int8 [num_rows, num_columns], or uint8 [num_rows, num_columns / 2]: codes plus 8
    codes: Tensor
    scale: Tensor  # float32 [num_rows, groups], or of scale and shift [num_rows, groups, 2]

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def has_shift(self) -> bool:
        return self.scale.ndim == 3

    @property
    def group_size(self) -> int:
        """Columns with one scale: 32, 64 or 128."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def shape(self) -> torch.Size:
        """[num_rows, num_columns]."""
        return torch.Size((len(self.codes), self.codes.shape[1] * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """Always False: GPUs have `Packed`."""
        return self.codes.is_cuda

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> "Integers":
        """Return a view of a range of rows."""
        return Integers(self.codes[rows], self.scale[rows])

    def split(self, sizes: list[int]) -> "list[Integers]":
        """Return views of N rows each."""
        return [self[begin:end] for begin, end in pairwise([0, *accumulate(sizes)])]

    def dequantized(self) -> Tensor:
        """Return the numbers, float32."""
        codes = self.codes
        if self.bits == 4:
            units = codes.view(len(codes), -1, UNIT // 2)
            codes = torch.cat([units & 15, units >> 4], -1).to(torch.int8) - 8
        groups = codes.reshape(len(codes), -1, self.group_size).float()
        if not self.has_shift:
            return (groups * self.scale[..., None]).flatten(1)
        scale, shift = self.scale[..., None].unbind(-2)
        return (groups * scale + shift).flatten(1)


def fitting_group(num_columns: int, group_size: int) -> int:
    """Return the size of groups as `Integers` have them, or 0 if none fits.

    group_size: columns that share a scale; the last group may have fewer.
    """
    group = math.gcd(group_size, num_columns, MAX_GROUP)
    return 0 if num_columns % UNIT or group < MIN_GROUP else group


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return `Integers.codes` of signed integers [num_rows, num_columns]."""
    if bits == 8:
        return codes.to(torch.int8)
    low, high = (codes + 8).to(torch.uint8).view(len(codes), -1, 2, UNIT // 2).unbind(2)
    return (low | high << 4).flatten(1)


def quantize(weight: Tensor, bits: int) -> Integers:
    """Return the nearest integers of a matrix, whose columns are whole units. Raises ValueError.

    The scale makes the number of the largest magnitude an end of the range: with 4 bits, -8.
    """
    if weight.shape[1] % UNIT:
        raise ValueError(f"columns: got {weight.shape[1]}, expected a multiple of {UNIT}")
    groups = weight.float().view(len(weight), -1, UNIT)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = largest.abs() / 127 if bits == 8 else largest / -8
    codes = torch.where(scale == 0, 0, groups / scale).round()
    if bits == 4:
        codes = codes.clamp(-8, 7)
    return Integers(pack(codes.flatten(1), bits), scale[..., 0])


def without_needless_shift(matrix: Integers) -> Tensor:
    """Return the scales, alone if no number is shifted."""
    if not matrix.has_shift or matrix.scale[..., 1].any():
        return matrix.scale
    return matrix.scale[..., 0].contiguous()
