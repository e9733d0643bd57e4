"""Matrices of integers of 4 or 8 bits, in groups of columns that share a scale.

For GPUs, `Packed`: number k of row n stands for `(code - zero) * scale`, as AutoAWQ, GPTQModel and
compressed-tensors define it. The bit orders of all checkpoints are converted to one order: 128
columns of a row are a block of 4 * bits adjacent words of 32 bits. The blocks of all rows are
adjacent, so that a tile of rows is contiguous.

For CPUs, `Integers`: a unit is 64 columns of a row. With 4 bits a byte has two columns of a unit,
32 apart, so that vectors of bytes become vectors of adjacent columns.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.layouts.packed import BLOCK, ZERO_BITS


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed matrices [..., num_rows, num_columns]."""

    words: Tensor  # int32 [..., blocks, num_rows, 4 * bits]; the last block is padded
    groups: Tensor  # int32 [..., groups, num_rows]: scale and zero point from `pack_groups`
    # int32 [..., num_columns]: the matrix's column of each packed column, sorted by groups; None:
    # columns are packed in the matrix's order
    order: Tensor | None
    num_columns: int
    group_size: int  # packed columns that share a scale

    @property
    def bits(self) -> int:
        """Bits of an integer: 4 or 8."""
        return self.words.shape[-1] // 4

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix: [..., num_rows, num_columns]."""
        return torch.Size((*self.words.shape[:-3], self.words.shape[-2], self.num_columns))

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def is_cuda(self) -> bool:
        return self.words.is_cuda

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> "Packed":
        """Return a view of one matrix, or of a range of rows of a matrix."""
        rows = (slice(None), index) if self.words.ndim == 3 else index
        order = self.order if self.order is None or self.words.ndim == 3 else self.order[index]
        sizes = self.num_columns, self.group_size
        return Packed(self.words[rows], self.groups[rows], order, *sizes)

    def split(self, sizes: list[int]) -> "list[Packed]":
        """Return views of N rows of a matrix."""
        return [self[begin:end] for begin, end in pairwise([0, *accumulate(sizes)])]

    def dequantized(self) -> Tensor:
        """Return the numbers in float32: [..., num_rows, num_columns]."""
        codes = unpack_codes(self.words)[..., : self.num_columns]
        scale, zeros = map(self._by_column, unpack_groups(self.groups))
        numbers = (codes.float() - zeros) * scale
        if self.order is None:
            return numbers
        places = self.order.long().argsort(-1)[..., None, :].expand(numbers.shape)
        return numbers.gather(-1, places)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the matrix has this shape (-1: any size), contiguous."""
        words, columns = self.words, self.num_columns
        *others, rows, _ = self.shape
        if columns != shape[-1] or len(self.shape) != len(shape):
            raise ValueError(f"{name}: got shape {list(self.shape)}, expected {list(shape)}")
        check_tensor(name, words, (*others, num_groups(columns, BLOCK), rows, -1), torch.int32)
        groups = *others, num_groups(columns, self.group_size), rows
        check_tensor(f"{name}'s groups", self.groups, groups, torch.int32)
        parts = {"": words, "'s groups": self.groups}
        if self.order is not None:
            check_tensor(f"{name}'s order", self.order, (*others, columns), torch.int32)
            parts["'s order"] = self.order
        for part, tensor in parts.items():
            if self.is_cuda:
                check_contiguous(f"{name}{part}", tensor)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a matrix, rounded once: [num_rows, num_columns]."""
        if not self.is_cuda:
            return self.dequantized().to(dtype)
        from penstock.kernels.packed.triton_packed import dequantized

        return dequantized(self, dtype)

    def multiply(
        self,
        kind: str,
        x: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor | None:
        """Return the result of one kernel; None if cuBLAS is faster."""
        from penstock.kernels.packed.triton_packed import multiply

        return multiply(kind, x, self, norm_weight, eps, residual, out)

    def pairs_of_tile(self, num_pairs: int, num_experts: int) -> int:
        """Return the number of (token, expert) pairs in a tile of `grouped`."""
        from penstock.kernels.packed.triton_packed import pairs_of_tile

        return pairs_of_tile(num_pairs, num_experts)

    def grouped(self, x: Tensor, sources: Tensor, tiles: Tensor, swiglu: bool, bm: int) -> Tensor:
        """Multiply pairs with these matrices, which belong to one expert each."""
        from penstock.kernels.packed.triton_packed import packed_grouped

        return packed_grouped(x, sources, tiles, self, swiglu, bm)

    def _by_column(self, of_groups: Tensor) -> Tensor:
        """Expand numbers of groups [..., groups, num_rows] to [..., num_rows, num_columns]."""
        wide = of_groups.repeat_interleave(self.group_size, -2)
        return wide[..., : self.num_columns, :].transpose(-1, -2)


def num_groups(num_columns: int, group_size: int) -> int:
    """Return the number of groups of a row."""
    return -(-num_columns // group_size)


def pack_groups(scale: Tensor, zeros: Tensor) -> Tensor:
    """Return a word for each scale and zero point (uint8): int32, of the same shape.

    A word is the scale in float32 with the zero point in its lowest 8 bits, so that one
    asynchronous copy brings both. Scales of float16 and bfloat16 are exact; scales of float32 are
    rounded to 16 bits of mantissa.
    """
    bits = scale.float().contiguous().view(torch.int32)
    return (bits + (ZERO_BITS + 1) // 2 & ~ZERO_BITS) | zeros.int()


def unpack_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales (float32) and the zero points (uint8) of words."""
    return (groups & ~ZERO_BITS).view(torch.float32), (groups & ZERO_BITS).byte()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 [num_rows, num_columns], into words [blocks, num_rows, 4 * bits].

    With 4 bits, column 32 * r + 8 * p + 2 * c + h of a block is in word 4 * r + c, at bit 4 * p +
    16 * h. With 8 bits, column 16 * r + 8 * p + 2 * c + h is in word 4 * r + c, at bit 8 * p + 16 *
    h. A thread's words then hold the numbers that tensor cores expect in its registers, in pairs.
    """
    num_rows, num_columns = codes.shape
    padded = functional.pad(codes, (0, -num_columns % BLOCK))
    by_row = padded.view(num_rows, -1, bits, 16 // bits, 4, 2)
    octets = by_row.permute(1, 0, 2, 4, 5, 3)  # [block, row, r, c, h, p]
    if bits == 4:
        octets = octets[..., 0::2] | octets[..., 1::2] << 4
    return octets.flatten(2).contiguous().view(torch.int32)


def unpack_codes(words: Tensor) -> Tensor:
    """Return the codes of words: uint8 [..., num_rows, columns including the padding]."""
    octets = words.contiguous().view(torch.uint8)
    octets = octets.view(*octets.shape[:-1], -1, 4, 2, 2)
    if words.shape[-1] == 4 * 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    blocks = octets.movedim(-1, -3).flatten(-4)  # [..., block, row, column of the block]
    return blocks.transpose(-3, -2).flatten(-2)


UNIT = 64  # columns
MAX_GROUP = 128  # maximum columns of a group; larger groups are stored as several
MIN_GROUP = 32


@dataclass(frozen=True, slots=True)
class Integers:
    """Matrix [num_rows, num_columns]: `codes * scale`, plus an optional shift for each group."""

    # int8 [num_rows, num_columns], or uint8 [num_rows, num_columns / 2]: codes plus 8
    codes: Tensor
    scale: Tensor  # float32 [num_rows, groups]; with shifts [num_rows, groups, 2]: scale and shift

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def has_shift(self) -> bool:
        return self.scale.ndim == 3

    @property
    def group_size(self) -> int:
        """Columns that share a scale: 32, 64 or 128."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix: [num_rows, num_columns]."""
        return torch.Size((len(self.codes), self.codes.shape[1] * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """Always False, since GPUs use `Packed`."""
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
        """Return the numbers in float32."""
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
    """Return a group size that `Integers` support, or 0 if none fits.

    group_size: columns that share a scale; the last group may have fewer.
    """
    group = math.gcd(group_size, num_columns, MAX_GROUP)
    return 0 if num_columns % UNIT or group < MIN_GROUP else group


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return `Integers.codes` from signed integers [num_rows, num_columns]."""
    if bits == 8:
        return codes.to(torch.int8)
    low, high = (codes + 8).to(torch.uint8).view(len(codes), -1, 2, UNIT // 2).unbind(2)
    return (low | high << 4).flatten(1)


def quantize(weight: Tensor, bits: int) -> Integers:
    """Round a matrix to the nearest integers; its columns must be whole units. Raises ValueError.

    The scale maps the number of the largest magnitude to an end of the range: with 4 bits, -8.
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
    """Return scales without shifts if every shift is zero."""
    if not matrix.has_shift or matrix.scale[..., 1].any():
        return matrix.scale
    return matrix.scale[..., 0].contiguous()
