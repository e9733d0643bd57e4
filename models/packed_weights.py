"""Weights of integers, as the files of AWQ, GPTQ and compressed-tensors have them.

- AWQ: `qweight` [in, out / 8], whose nibbles are columns 0 2 4 6 1 3 5 7; `qzeros` [groups,
  out / 8] likewise; `scales` [groups, out].
- GPTQ: `qweight` [in / 8, out]; `qzeros` [groups, out / 8], in its first version less by 1;
  `scales` [groups, out]; `g_idx` [in], the group of each column.
- compressed-tensors: `weight_packed` [out, in / 8], or int8 `weight` [out, in]; `weight_scale`
  [out, groups]; `weight_zero_point` [out / 8, groups], with int8 [out, groups]; `weight_g_idx`
  [in].

The first nibble is the lowest one. With 8 bits, a word has 4 numbers in place of 8.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.packed.matrices import UNIT, Packed, pack, pack_codes, pack_groups
from penstock.models.checkpoint_tensors import CheckpointTensors
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.quantization import WeightFormat

_AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of each of 8 columns
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Codes:
    """A part of a matrix: `(codes - zeros) * scale`, by the group of each column."""

    codes: Tensor  # uint8 [num_rows, num_columns]
    scale: Tensor  # float16, bfloat16 or float32 [num_rows, groups of the matrix]
    zeros: Tensor  # uint8 as `scale`
    groups: Tensor  # int64 [num_columns]

    def dequantized(self) -> Tensor:
        """Return the numbers, in the type of the scales."""
        dtype, groups = self.scale.dtype, self.groups
        codes, zeros = self.codes.to(dtype), self.zeros.to(dtype)
        return (codes - zeros[:, groups]) * self.scale[:, groups]


def read_codes(
    tensors: CheckpointTensors,
    name: str,
    shape: tuple[int, ...],
    cuts: tuple[slice, slice],
    weight_format: WeightFormat,
    device: torch.device,
) -> Codes:
    """Return the rows and columns `cuts` of a weight. Raises ModelError.

    name: of the weight; shape: [out_features, in_features].
    """
    module, matrix = name.removesuffix(".weight"), tensors.matrix(name)
    rows, columns = cuts
    bits = weight_format.bits
    source = _Source(tensors, bits, weight_format.awq_order, device)
    group_size = weight_format.group_size or shape[1]
    num_groups = -(-shape[1] // group_size)
    groups = torch.arange(columns.start, columns.stop, device=device) // group_size
    if matrix.endswith(".qweight"):
        packed = 1 if weight_format.awq_order else 0
        codes = source.codes(matrix, packed, (shape[1], shape[0]), (columns, rows)).t()
        by_group = (num_groups, shape[0]), (slice(0, num_groups), rows)
        zeros = source.codes(f"{module}.qzeros", 1, *by_group).t()
        zeros = zeros + weight_format.zero_offset & (1 << bits) - 1
        scale = source.scale(f"{module}.scales", by_group[0], (_ALL, rows)).t()
        index = f"{module}.g_idx"
    else:
        by_group = (shape[0], num_groups), (rows, slice(0, num_groups))
        half = 1 << (bits - 1)
        zero_name = f"{module}.weight_zero_point"
        scale = source.scale(f"{module}.weight_scale", by_group[0], (rows, _ALL))
        zeros = torch.full_like(scale, half, dtype=torch.uint8)
        if matrix.endswith(".weight_packed"):
            codes = source.codes(matrix, 1, (shape[0], shape[1]), cuts)
            if zero_name in tensors:
                zeros = source.codes(zero_name, 0, *by_group)
        else:
            codes = source.whole(matrix, shape, cuts).view(torch.uint8) ^ half
            if zero_name in tensors:
                signed = source.whole(zero_name, by_group[0], (rows, _ALL))
                zeros = signed.view(torch.uint8) ^ half
        index = f"{module}.weight_g_idx"
    if index in tensors and weight_format.group_size:
        groups = source.whole(index, (shape[1],), (columns,)).long()
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise ModelError(f"{index}: got group {int(groups.max())}, expected 0 to {num_groups}")
    return Codes(codes, scale, zeros, groups)


@dataclass(frozen=True, slots=True)
class _Source:
    """Tensors of a checkpoint, on a device."""

    tensors: CheckpointTensors
    bits: int
    awq_order: bool
    device: torch.device

    def whole(self, name: str, shape: tuple[int, ...], cuts: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor that is not packed."""
        self._check(name, shape)
        return self.tensors.read(name, *cuts).to(self.device)

    def scale(self, name: str, shape: tuple[int, ...], cuts: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor of scales."""
        self.tensors.check_scale(name)
        return self.whole(name, shape, cuts)

    def codes(
        self, name: str, packed: int, shape: tuple[int, int], cuts: tuple[slice, slice]
    ) -> Tensor:
        """Return a part of a tensor of this shape, of which one dimension is packed."""
        per_word = 32 // self.bits
        words = list(shape)
        words[packed] = -(-shape[packed] // per_word)
        self._check(name, tuple(words))
        cut = cuts[packed]
        first = cut.start // per_word
        part = [*cuts]
        part[packed] = slice(first, -(-cut.stop // per_word))
        octets = self.tensors.read(name, *part).to(self.device).contiguous().view(torch.uint8)
        if self.bits == 4:
            octets = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
        by_word = octets.view(len(octets), -1, per_word)
        if self.awq_order:
            by_word = by_word[..., _AWQ_NIBBLES]
        codes = by_word.flatten(1) if packed else by_word.transpose(1, 2).flatten(0, 1)
        skipped = cut.start - first * per_word
        return codes.narrow(packed, skipped, cut.stop - cut.start)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.tensors.shape(name)
        if found != shape:
            raise ModelError(
                f"{name} in {self.tensors.file(name)}: got shape {list(found)}, "
                f"expected {list(shape)} from config.json"
            )


def why_dequantized(name: str, columns: int, weight_format: WeightFormat) -> str:
    """Return why a rank's part of a weight with `columns` columns does not stay packed."""
    if ".experts." in name:
        return "experts stay packed on GPUs only"
    if weight_format.act_order:
        return "the columns of a group are not adjacent (desc_act)"
    if columns % UNIT:
        return f"got {columns} columns, expected a multiple of {UNIT}"
    return "layers are not compiled, or have --dtype float32"


def copy_codes(target: Any, source: Codes, name: str) -> None:
    """Pack a matrix into its place, with sorted columns if that has an order. Raises ModelError."""
    codes, groups = source.codes, source.groups
    if isinstance(target, Packed) and target.order is not None:
        order = groups.argsort(stable=True)
        codes, groups = codes[:, order], groups[order]
        if target.order[0] == target.order[-1]:  # not loaded yet
            target.order.copy_(order)
        elif not torch.equal(target.order.long(), order):
            raise ModelError(
                f"{name}: got other groups of columns (g_idx) than the layers with the same input, "
                "expected the same"
            )
    size = target.group_size
    firsts = groups[::size]
    if not torch.equal(firsts.repeat_interleave(size)[: len(groups)], groups):
        raise ModelError(
            f"{name}: got g_idx with columns of a group that are not adjacent, expected "
            f"groups of {size}, or desc_act: true in quantization_config"
        )
    scale, zeros = source.scale[:, firsts], source.zeros[:, firsts]
    if isinstance(target, Packed):
        target.words.copy_(pack_codes(codes.contiguous(), target.bits))
        target.groups.copy_(pack_groups(scale, zeros).t())
        return
    half = 1 << (target.bits - 1)
    target.codes.copy_(pack(codes.short() - half, target.bits))
    scale = scale.float()
    target.scale.copy_(torch.stack([scale, (half - zeros.float()) * scale], -1))
