"""Loading a Hugging Face checkpoint: safetensors, in one file or sharded.

Only this rank's slice of every tensor is read. A weight in e4m3 keeps the scales of its rows, or of
its blocks of 128 by 128 (Qwen3-*-FP8). If the rank's part does not consist of whole blocks, each
row of the part gets a scale. The same holds for a 16-bit weight that is served in 8 bits. Weights
of integers are packed differently for GPUs and for CPUs. If this is impossible, they are
dequantized.

The files of AWQ, GPTQ and compressed-tensors contain integers as follows:

- AWQ: `qweight` [in, out / 8], whose nibbles are columns 0 2 4 6 1 3 5 7; `qzeros` [groups,
  out / 8] in the same order; `scales` [groups, out].
- GPTQ: `qweight` [in / 8, out]; `qzeros` [groups, out / 8], in its first version less by 1;
  `scales` [groups, out]; `g_idx` [in], the group of each column.
- compressed-tensors: `weight_packed` [out, in / 8], or int8 `weight` [out, in]; `weight_scale`
  [out, groups]; `weight_zero_point` [out / 8, groups], with int8 [out, groups]; `weight_g_idx`
  [in].

The first nibble is the lowest one. With 8 bits, a word has 4 numbers in place of 8.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from penstock.kernels.elementwise import copy_into
from penstock.kernels.matrices import BLOCK, FP8, Quantized, Rows
from penstock.kernels.packed.matrices import (
    UNIT,
    Packed,
    pack,
    pack_codes,
    pack_groups,
    unpack_groups,
)
from penstock.models.architecture import describe
from penstock.models.parallel import Layer, Slice
from penstock.protocol.checkpoint import ModelConfig, ModelError
from penstock.protocol.checkpoint_files import (
    BARE,
    BIAS,
    MATRICES,
    SINGLE_FILE,
    TIED,
    UNREAD,
    FusedPart,
    check_names,
    fused_parts,
    is_fused,
    read_index,
    weight_names,
)
from penstock.protocol.quantization import WeightFormat

log = logging.getLogger(__name__)
NAN_CODE = 0x7F  # NaN in e4m3, without the sign
SCALES = "_scale_inv"  # suffix added to a weight's name for the scales of its e4m3 blocks
# names in compressed-tensors and modelopt for scales of blocks, of rows, or of the whole weight
OTHER_SCALES = "_scale"
_FLOATS = ("F16", "BF16", "F32")
_AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of each of 8 columns
_ALL = slice(None)


class CheckpointTensors:
    """Tensors of a folder; files are opened once. All methods raise ModelError."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Open the files; prefix: prefix of the model's names, which names in the files lack."""
        self._prefix = prefix
        single, weight_map = folder / SINGLE_FILE, read_index(folder)
        self._open: dict[Path, Any] = {}
        self._fused: dict[str, FusedPart] = {}
        try:
            if weight_map is not None:
                self.files = {name: folder / file for name, file in weight_map.items()}
            else:
                self._open[single] = safe_open(single, framework="pt")
                self.files = dict.fromkeys(self._open[single].keys(), single)
            self.files = {prefix + name: file for name, file in self.files.items()}
            fused = {name: self.shape(name) for name in self.files if is_fused(name)}
            self._fused = fused_parts(fused)
            files = {name: self.files[part.tensor] for name, part in self._fused.items()}
            self.files = {name: self.files[name] for name in self.files if name not in fused}
            self.files |= files
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{folder}: could not read the weights: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def weights(self) -> set[str]:
        """Return the names of all weights; a packed weight has the name of its unpacked weight."""
        return weight_names(self.files)

    def matrix(self, weight: str) -> str:
        """Return the name of the tensor that contains a weight's numbers."""
        module = weight.removesuffix(".weight")
        return next((module + end for end in MATRICES if module + end in self.files), weight)

    def file(self, name: str) -> Path:
        """Return the path of the file with a tensor."""
        if name not in self.files:
            raise ModelError(f"the checkpoint lacks {name}")
        return self.files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raise ModelError for a tensor of another shape."""
        if (found := self.shape(name)) != expected:
            raise ModelError(
                f"{name} in {self.file(name)}: got shape {list(found)}, "
                f"expected {list(expected)} from config.json"
            )

    def check_scale(self, name: str) -> None:
        """Raise ModelError unless a tensor has a dtype allowed for scales."""
        found = self._slice(name).get_dtype()
        if found not in _FLOATS:
            raise ModelError(f"{name}: got {found}, expected one of {', '.join(_FLOATS)}")

    def read(self, name: str, *cuts: slice) -> Tensor:
        """Return a part of a tensor, or the whole tensor."""
        source = self._slice(name)
        try:
            if cuts or name in self._fused:
                tensor: Tensor = source[cuts or (_ALL, _ALL)]
            else:
                stored = name.removeprefix(self._prefix)
                tensor = self._open[self.files[name]].get_tensor(stored)
            return tensor
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.files[name]}: could not read the file: {error}") from error

    def _slice(self, name: str) -> Any:
        path, part = self.file(name), self._fused.get(name)
        stored = (part.tensor if part else name).removeprefix(self._prefix)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            source = self._open[path].get_slice(stored)
            return _ExpertSlice(source, part) if part else source
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: could not read the file: {error}") from error


@dataclass(frozen=True, slots=True)
class _ExpertSlice:
    """An expert's matrix in a tensor of all experts, with the methods of safetensors' slices."""

    source: Any
    part: FusedPart

    def get_shape(self) -> list[int]:
        return [self.part.stop - self.part.start, self.source.get_shape()[2]]

    def get_dtype(self) -> str:
        return str(self.source.get_dtype())

    def __getitem__(self, cuts: tuple[slice, slice]) -> Tensor:
        _, expert, first, last = self.part
        begin, end, _ = cuts[0].indices(last - first)
        rows = slice(first + begin, first + end)
        matrix: Tensor = self.source[expert : expert + 1, rows, cuts[1]]
        return matrix[0]


def with_own_head(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the model with a separate output layer if the checkpoint's differs from the embedding.

    As in transformers, the value of `tie_word_embeddings` is ignored. Raises ModelError.
    """
    if not config.tie_word_embeddings or config.is_embedding_model:
        return config
    tensors = CheckpointTensors(folder)
    name = describe(config).of_kind("embedding")[0].weights[0].name
    if TIED not in tensors or name not in tensors:
        return config
    head, embedding = tensors.read(TIED), tensors.read(name)
    if head.dtype == embedding.dtype and torch.equal(_words(head), _words(embedding)):
        return config
    log.warning(
        "tie_word_embeddings: got true, but %s differs from the embedding: it is used", TIED
    )
    return msgspec.structs.replace(config, tie_word_embeddings=False)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as large integers, which compare five times as fast."""
    raw = tensor.view(torch.uint8).flatten()
    return raw.view(torch.int64) if len(raw) % 8 == 0 else raw


def load_weights(
    model: nn.Module,
    folder: Path,
    on_progress: Callable[[], None],
    weight_format: WeightFormat | None = None,
    *,
    log_files: bool = False,
) -> None:
    """Fill the weight of every `Layer` in `model`, converting to its dtype.

    on_progress: called after each tensor. weight_format: format of integer weights. log_files: log
    when each of several files is finished. Raises ModelError for a missing or unknown tensor, a
    wrong shape, and a file that can't be read.
    """
    tensors = CheckpointTensors(folder)
    if not getattr(model, "has_head", True) and BARE in tensors:
        tensors = CheckpointTensors(folder, "model.")
    layers = (module for module in model.modules() if isinstance(module, Layer))
    slices = [part for layer in layers for part in layer.slices()]
    names = {part.name for part in slices}
    if log_files:
        _log_unread(tensors, names)
    check_names(folder, names, tensors.weights())
    dequantized = []
    by_file = defaultdict(list)
    for part in slices:
        by_file[tensors.file(tensors.matrix(part.name))].append(part)
    for number, file in enumerate(sorted(by_file), 1):
        for part in by_file[file]:
            if part.start < part.stop:
                if _load(tensors, part, weight_format):
                    dequantized.append(part)
                _check_numbers(tensors, part)
            on_progress()
        if log_files and len(by_file) > 1:
            log.info("weights: %d of %d files", number, len(by_file))
    if dequantized and weight_format:
        first, rest = dequantized[0], (len(dequantized), len(slices))
        reason = why_dequantized(first.name, first.target.shape[1], weight_format)
        log.warning("%d of %d weights are dequantized, such as %s: %s", *rest, first.name, reason)


def _log_unread(tensors: CheckpointTensors, read: set[str]) -> None:
    for beginning in UNREAD:
        number = sum(name.startswith(beginning) for name in tensors.weights() - read)
        if number:
            log.info("weights: %d tensors %s* are not read", number, beginning)


def _load(tensors: CheckpointTensors, part: Slice, weight_format: WeightFormat | None) -> bool:
    """Read a slice into its target, and return True if integers were dequantized."""
    matrix = tensors.matrix(part.name)
    cut = slice(part.start, part.stop)
    cuts = tuple(cut if dim == part.dim else slice(0, size) for dim, size in enumerate(part.shape))
    if matrix == part.name:
        tensors.check_shape(matrix, part.shape)
        tensor = tensors.read(matrix, *cuts)
        if tensor.dtype != torch.int8:
            _copy(tensor, part, tensors)
            if part.added and isinstance(part.target, Tensor):
                part.target.add_(part.added)
            return False
    if weight_format is None or weight_format.is_fp8:
        raise ModelError(
            f"{matrix}: got packed integers, expected their format in quantization_config"
        )
    bias = part.name.removesuffix(".weight") + BIAS
    if bias in tensors and tensors.read(bias).any():
        raise ModelError(f"{bias}: got numbers other than 0, expected no bias")
    codes = read_codes(tensors, part, (cuts[0], cuts[1]), weight_format)
    if not isinstance(part.target, Tensor | Quantized):
        copy_codes(part.target, codes, part.name)
        return False
    copy_into(part.target, codes.dequantized())
    return True


def _check_numbers(tensors: CheckpointTensors, part: Slice) -> None:
    """Raise ModelError for NaN and infinite numbers, also if the model's dtype can't hold them."""
    target: Any = part.target
    if isinstance(target, Tensor):
        numbers = target
    else:
        numbers = unpack_groups(target.groups)[0] if isinstance(target, Packed) else target.scale
    is_finite = all(map(torch.isfinite, torch.aminmax(numbers)))
    if isinstance(target, Quantized) and is_finite:
        is_finite = bool(((target.values.view(torch.uint8) & NAN_CODE) != NAN_CODE).all())
    if not is_finite:
        file = tensors.file(tensors.matrix(part.name))
        raise ModelError(
            f"{part.name} in {file}: got NaN or infinite numbers, expected finite ones in "
            f"{numbers.dtype}; download it again, or give another --dtype"
        )


def _copy(tensor: Tensor, part: Slice, tensors: CheckpointTensors) -> None:
    """Copy the slice of a weight that has no integers."""
    target = part.target
    if not isinstance(target, Tensor | Quantized) or not tensor.is_floating_point():
        raise ModelError(
            f"{part.name}: got {tensor.dtype}, expected packed integers, or the layer's name among "
            "the layers that quantization_config excludes"
        )
    if tensor.dtype == FP8:
        _copy_fp8(target, tensor, part, tensors)
    else:
        copy_into(target, tensor)


def _copy_fp8(target: Rows, tensor: Tensor, part: Slice, tensors: CheckpointTensors) -> None:
    """Copy the slice of a weight in e4m3 with its scales."""
    ends = SCALES, OTHER_SCALES
    name = next((part.name + end for end in ends if part.name + end in tensors), "")
    scale = tensors.read(name).float() if name else None
    num_rows, num_blocks = part.shape[0], [-(-size // BLOCK) for size in part.shape]
    if scale is not None and list(scale.shape) == num_blocks:
        _copy_in_blocks(target, tensor, part, scale)
        return
    if scale is None or name.endswith(SCALES) or scale.numel() not in (1, num_rows):
        found = "no scales" if scale is None else f"scales of shape {list(scale.shape)}"
        path = tensors.file(part.name)
        raise ModelError(f"{part.name} in {path}: got {found}, expected shape {num_blocks}")
    device = target.device
    rows = slice(part.start, part.stop) if part.dim == 0 else slice(None)
    of_rows = scale.reshape(-1).expand(num_rows)[rows]
    copy_into(target, Quantized(tensor.to(device), of_rows.to(device)))


def _copy_in_blocks(target: Rows, tensor: Tensor, part: Slice, scale: Tensor) -> None:
    """Copy the slice in whole blocks, otherwise via float32; scale: scales of all blocks."""
    device = target.device
    first, rest = part.start // BLOCK, part.start % BLOCK
    blocks = slice(first, -(-part.stop // BLOCK))
    scale = (scale[blocks] if part.dim == 0 else scale[:, blocks]).to(device)
    if isinstance(target, Quantized) and target.in_blocks:
        copy_into(target, Quantized(tensor, scale))
        return
    padding = (rest, 0, 0, 0) if part.dim else (0, 0, rest, 0)
    values = functional.pad(tensor.to(device).float(), padding)  # padded to the start of a block
    wide = Quantized(values, scale).dequantized()
    copy_into(target, wide[:, rest:] if part.dim else wide[rest:])


@dataclass(frozen=True, slots=True)
class Codes:
    """Part of a matrix, `(codes - zeros) * scale`, by the group of each column."""

    codes: Tensor  # uint8 [num_rows, num_columns]
    scale: Tensor  # float16, bfloat16 or float32 [num_rows, groups of the matrix]
    zeros: Tensor  # uint8, with the shape of `scale`
    groups: Tensor  # int64 [num_columns]

    def dequantized(self) -> Tensor:
        """Return the numbers in the dtype of the scales."""
        dtype, groups = self.scale.dtype, self.groups
        codes, zeros = self.codes.to(dtype), self.zeros.to(dtype)
        return (codes - zeros[:, groups]) * self.scale[:, groups]


def read_codes(
    tensors: CheckpointTensors, part: Slice, cuts: tuple[slice, slice], weight_format: WeightFormat
) -> Codes:
    """Return the rows and columns `cuts` of a slice's weight. Raises ModelError."""
    module, matrix = part.name.removesuffix(".weight"), tensors.matrix(part.name)
    (rows, columns), shape, device = cuts, part.shape, part.target.device
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
            found = f"got groups {int(groups.min())} to {int(groups.max())}"
            raise ModelError(f"{index}: {found}, expected 0 to {num_groups - 1}")
    return Codes(codes, scale, zeros, groups)


@dataclass(frozen=True, slots=True)
class _Source:
    """Tensors of a checkpoint, on a device."""

    tensors: CheckpointTensors
    bits: int
    awq_order: bool
    device: torch.device

    def whole(self, name: str, shape: tuple[int, ...], cuts: tuple[slice, ...]) -> Tensor:
        """Return a part of an unpacked tensor."""
        self.tensors.check_shape(name, shape)
        return self.tensors.read(name, *cuts).to(self.device)

    def scale(self, name: str, shape: tuple[int, ...], cuts: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor of scales."""
        self.tensors.check_scale(name)
        return self.whole(name, shape, cuts)

    def codes(
        self, name: str, packed: int, shape: tuple[int, int], cuts: tuple[slice, slice]
    ) -> Tensor:
        """Return a part of a tensor with this shape, one dimension of which is packed."""
        per_word = 32 // self.bits
        words = list(shape)
        words[packed] = -(-shape[packed] // per_word)
        self.tensors.check_shape(name, tuple(words))
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


def why_dequantized(name: str, columns: int, weight_format: WeightFormat) -> str:
    """Return the reason why a rank's part with `columns` columns does not stay packed."""
    if ".experts." in name:
        return "experts stay packed on GPUs only"
    if weight_format.act_order:
        return "the columns of a group are not adjacent (desc_act)"
    if columns % UNIT:
        return f"got {columns} columns, expected a multiple of {UNIT}"
    return "layers are not compiled, or have --dtype float32"


def copy_codes(target: Any, source: Codes, name: str) -> None:
    """Pack a matrix into its target, sorting columns if it has an order. Raises ModelError."""
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
