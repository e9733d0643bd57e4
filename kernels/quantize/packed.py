"""Matrices of integers of 4 or 8 bits, in groups of columns that share a scale and a zero point.

Number k of row n stands for `(code - zero) * scale`, as AutoAWQ, GPTQModel and compressed-tensors
define it. All checkpoints' orders of bits become one: 128 columns
of a row are 4 * bits adjacent words of 32 bits, and such blocks of all rows follow each other, so
that a tile of rows is contiguous.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.argument_checks import check_contiguous, check_tensor

BLOCK = 128  # columns of a row whose words are adjacent

ZERO_BITS = 255  # the lowest bits of a scale in float32, 0 in every number of float16 and bfloat16


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed matrices [..., num_rows, num_columns]."""

    words: Tensor  # int32 [..., blocks, num_rows, 4 * bits]; the last block is padded
    groups: Tensor  # int32 [..., groups, num_rows], of `pack_groups`: a scale and a zero point
    # int32 [..., num_columns]: the matrix's column of each packed one, sorted by groups; None:
    # packed in the matrix's order
    order: Tensor | None
    num_columns: int
    group_size: int  # packed columns with one scale

    @property
    def bits(self) -> int:
        """4 or 8."""
        return self.words.shape[-1] // 4

    @property
    def shape(self) -> torch.Size:
        """[..., num_rows, num_columns]."""
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
        """Return views of N rows each, of a matrix."""
        return [self[begin:end] for begin, end in pairwise([0, *accumulate(sizes)])]

    def dequantized(self) -> Tensor:
        """Return the numbers, in float32: [..., num_rows, num_columns]."""
        codes = unpack_codes(self.words)[..., : self.num_columns]
        scale, zeros = map(self._by_column, unpack_groups(self.groups))
        numbers = (codes.float() - zeros) * scale
        if self.order is None:
            return numbers
        places = self.order.long().argsort(-1)[..., None, :].expand(numbers.shape)
        return numbers.gather(-1, places)

    def _by_column(self, of_groups: Tensor) -> Tensor:
        """Return numbers of groups [..., groups, num_rows] as [..., num_rows, num_columns]."""
        wide = of_groups.repeat_interleave(self.group_size, -2)
        return wide[..., : self.num_columns, :].transpose(-1, -2)


def check_packed(name: str, weight: Packed, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight has this shape (-1: any size) and contiguous parts."""
    words, columns = weight.words, weight.num_columns
    *others, rows, _ = weight.shape
    if columns != shape[-1] or len(weight.shape) != len(shape):
        raise ValueError(f"{name}: got shape {list(weight.shape)}, expected {list(shape)}")
    check_tensor(name, words, (*others, num_groups(columns, BLOCK), rows, -1), torch.int32)
    groups = *others, num_groups(columns, weight.group_size), rows
    check_tensor(f"{name}'s groups", weight.groups, groups, torch.int32)
    parts = {"": words, "'s groups": weight.groups}
    if weight.order is not None:
        check_tensor(f"{name}'s order", weight.order, (*others, columns), torch.int32)
        parts["'s order"] = weight.order
    for part, tensor in parts.items():
        if weight.is_cuda:
            check_contiguous(f"{name}{part}", tensor)


def num_groups(num_columns: int, group_size: int) -> int:
    """Return the groups of a row."""
    return -(-num_columns // group_size)


def pack_groups(scale: Tensor, zeros: Tensor) -> Tensor:
    """Return one word for each scale and zero point (uint8): int32, of the same shape.

    A word is the scale in float32 with the zero point in its lowest 8 bits, so that one
    asynchronous copy brings both. Scales of float16 and bfloat16 are exact; scales of float32 are
    rounded to 16 bits of mantissa.
    """
    bits = scale.float().contiguous().view(torch.int32)
    return (bits + (ZERO_BITS + 1) // 2 & ~ZERO_BITS) | zeros.int()


def unpack_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale, in float32, and the zero point (uint8) of words."""
    return (groups & ~ZERO_BITS).view(torch.float32), (groups & ZERO_BITS).byte()


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return the words of codes, uint8 [num_rows, num_columns]: [blocks, num_rows, 4 * bits].

    Of 4 bits, column 32 * r + 8 * p + 2 * c + h of a block is in word 4 * r + c, at bit
    4 * p + 16 * h; of 8 bits, column 16 * r + 8 * p + 2 * c + h likewise, at bit 8 * p + 16 * h. A
    thread's words are then the numbers that tensor cores expect in its registers, in pairs.
    """
    num_rows, num_columns = codes.shape
    padded = functional.pad(codes, (0, -num_columns % BLOCK))
    by_row = padded.view(num_rows, -1, bits, 16 // bits, 4, 2)
    octets = by_row.permute(1, 0, 2, 4, 5, 3)  # [block, row, r, c, h, p]
    if bits == 4:
        octets = octets[..., 0::2] | octets[..., 1::2] << 4
    return octets.flatten(2).contiguous().view(torch.int32)


def unpack_codes(words: Tensor) -> Tensor:
    """Return the codes of words, uint8 [..., num_rows, columns with the padding]."""
    octets = words.contiguous().view(torch.uint8)
    octets = octets.view(*octets.shape[:-1], -1, 4, 2, 2)
    if words.shape[-1] == 4 * 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    blocks = octets.movedim(-1, -3).flatten(-4)  # [..., block, row, column of the block]
    return blocks.transpose(-3, -2).flatten(-2)
