"""Loading a Hugging Face checkpoint: safetensors, in one file or sharded.

Only this rank's slice of every tensor is read. A weight in e4m3 keeps the scales of its rows, or of
its blocks of 128 by 128 (Qwen3-*-FP8). If the rank's part does not consist of whole blocks, or for
a weight of 16 bits that is served in 8, each row of the part gets a scale. Weights of integers are
packed in one way for GPUs and another for CPUs, or where that is not possible, dequantized.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.kernels.elementwise import copy_into
from penstock.kernels.matrices import BLOCK, FP8, Quantized, Rows
from penstock.kernels.packed.matrices import Packed, unpack_groups
from penstock.models.checkpoint_tensors import CheckpointTensors
from penstock.models.packed_weights import copy_codes, read_codes, why_dequantized
from penstock.models.parallel import Layer, Slice
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.expected_weights import BARE, BIAS, check_names
from penstock.protocol.quantization import WeightFormat

log = logging.getLogger(__name__)
NAN_CODE = 0x7F  # of e4m3, without its sign
SCALES = "_scale_inv"  # suffix of a weight's name for the scales of e4m3, of its blocks
# as compressed-tensors and modelopt call them, of blocks, of rows, or of the whole weight
OTHER_SCALES = "_scale"


def load_weights(
    model: nn.Module,
    folder: Path,
    on_progress: Callable[[], None],
    weight_format: WeightFormat | None = None,
    *,
    log_files: bool = False,
) -> None:
    """Fill the weight of every `Layer` in `model`, converting to its dtype.

    Calls `on_progress` after each tensor. weight_format: of weights of integers. log_files: log
    the end of each of several files. Raises ModelError for a tensor that is missing, unknown or of
    another shape, and for a file that can't be read.
    """
    tensors = CheckpointTensors(folder)
    if not getattr(model, "has_head", True) and BARE in tensors:
        tensors = CheckpointTensors(folder, "model.")
    layers = ((name, one) for name, one in model.named_modules() if isinstance(one, Layer))
    slices = [part for name, layer in layers for part in layer.slices(name)]
    check_names(folder, {part.name for part in slices}, tensors.weights())
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


def _load(tensors: CheckpointTensors, part: Slice, weight_format: WeightFormat | None) -> bool:
    """Read a slice into its target, and return True if that has dequantized integers."""
    matrix = tensors.matrix(part.name)
    cut = slice(part.start, part.stop)
    cuts = (cut, slice(0, part.shape[-1])) if part.dim == 0 else (slice(0, part.shape[0]), cut)
    if matrix == part.name:
        shape = tensors.shape(matrix)
        if shape != part.shape:
            raise ModelError(
                f"{part.name} in {tensors.file(matrix)}: got shape {list(shape)}, "
                f"expected {list(part.shape)} from config.json"
            )
        tensor = tensors.read(matrix, *cuts[: len(shape)])
        if tensor.dtype != torch.int8:
            _copy(tensor, part, tensors)
            return False
    if weight_format is None or weight_format.is_fp8:
        raise ModelError(
            f"{matrix}: got packed integers, expected their format in quantization_config"
        )
    bias = part.name.removesuffix(".weight") + BIAS
    if bias in tensors and tensors.read(bias).any():
        raise ModelError(f"{bias}: got numbers other than 0, expected no bias")
    device = part.target.device
    codes = read_codes(tensors, part.name, part.shape, cuts, weight_format, device)
    if not isinstance(part.target, Tensor | Quantized):
        copy_codes(part.target, codes, part.name)
        return False
    copy_into(part.target, codes.dequantized())
    return True


def _check_numbers(tensors: CheckpointTensors, part: Slice) -> None:
    """Raise ModelError for NaN and infinite numbers, also where the model's dtype has none."""
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
    """Copy the slice of a weight that is not of integers."""
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
    """Copy the slice into whole blocks, otherwise by float32; scale: of all blocks."""
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
