"""Loading a Hugging Face checkpoint: safetensors, in one file or sharded.

Only this rank's slice of every tensor is read. A weight in 8 bits keeps the scales of its blocks of
128 by 128 (Qwen3-*-FP8). If the rank's part does not consist of whole blocks, or for a weight of 16
bits that is served in 8, each row of the part gets a scale.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from penstock.kernels.quantize.quantize import copy_into
from penstock.kernels.quantize.types import BLOCK, FP8, Quantized
from penstock.models.parallel import Layer, Slice
from penstock.protocol.checkpoint import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TIED = "lm_head.weight"
"""tensor that some checkpoints have although the embedding is used"""
COMPUTED = "rotary_emb.inv_freq"
"""frequencies that old versions of transformers wrote; computed from config.json"""
BARE = "embed_tokens.weight"
SCORES = ("score.", "classifier.")
SCALES = "_scale_inv"
"""suffix of a weight's name for its blocks' scales"""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """tensor → file name"""


def load_weights(model: nn.Module, folder: Path, on_progress: Callable[[], None]) -> None:
    """Fill the weight of every `Layer` in `model`, converting to its dtype.

    Calls `on_progress` after each tensor. Raises ModelError for a tensor that is missing, unknown
    or of another shape, and for a file that can't be read.
    """
    slices = list(_slices(model))
    files = _tensor_files(folder)
    scale_files = {name: files.pop(name) for name in list(files) if name.endswith(SCALES)}
    _check_names(folder, {part.name for part in slices}, set(files))
    scales = _read_scales(scale_files)
    by_file = defaultdict(list)
    for part in slices:
        by_file[files[part.name]].append(part)
    for path, parts in by_file.items():
        for _ in _read(path, parts, scales):
            on_progress()


def _slices(model: nn.Module) -> Iterator[Slice]:
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            yield from module.slices(name)


def _tensor_files(folder: Path) -> dict[str, Path]:
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    try:
        if index.exists():
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
            return {name: folder / file for name, file in weight_map.items()}
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise ModelError(f"{folder}: could not read the weights: {error}") from error


def _check_names(folder: Path, wanted: set[str], found: set[str]) -> None:
    missing, unknown = wanted - found, found - wanted - {TIED}
    unknown = {name for name in unknown if not name.endswith(COMPUTED)}
    if missing and BARE in found:
        raise ModelError(
            f"{folder} has {BARE} without 'model.' before it: an embedding model or another one "
            "without a head, which generates no text; give a checkpoint of Qwen3ForCausalLM"
        )
    if any(name.startswith(SCORES) for name in unknown):
        raise ModelError(
            f"{folder} has {min(unknown)}: a reranker or classifier, which scores texts and "
            "generates none; give a checkpoint of Qwen3ForCausalLM"
        )
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, such as {min(missing)}")
    if unknown:
        raise ModelError(f"{folder} has {len(unknown)} unknown tensors, such as {min(unknown)}")


def _read_scales(files: dict[str, Path]) -> dict[str, Tensor]:
    """Return all scales by name: one for 16,384 numbers of a weight, in any file."""
    scales = {}
    try:
        for path in set(files.values()):
            with safe_open(path, framework="pt") as file:
                for name in (name for name, its in files.items() if its == path):
                    scales[name] = file.get_tensor(name).float()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: could not read the file: {error}") from error
    return scales


def _read(path: Path, parts: list[Slice], scales: dict[str, Tensor]) -> Iterator[str]:
    """Read slices of one file into their targets and yields the names of the tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            for part in parts:
                source = file.get_slice(part.name)
                shape = tuple(source.get_shape())
                if shape != part.shape:
                    raise ModelError(
                        f"{part.name} in {path}: got shape {list(shape)}, "
                        f"expected {list(part.shape)} from config.json"
                    )
                cut = slice(part.start, part.stop)
                tensor = source[cut] if part.dim == 0 else source[:, cut]
                if tensor.dtype == FP8:
                    _copy_in_blocks(tensor, part, scales, path)
                else:
                    copy_into(part.target, tensor)
                yield part.name
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: could not read the file: {error}") from error


def _copy_in_blocks(tensor: Tensor, part: Slice, scales: dict[str, Tensor], path: Path) -> None:
    """Copy the slice of a weight with its scales into whole blocks, otherwise by float32."""
    scale = scales.get(f"{part.name}{SCALES}")
    num_blocks = [-(-size // BLOCK) for size in part.shape]
    if scale is None or list(scale.shape) != num_blocks:
        found = "no scales" if scale is None else f"scales of shape {list(scale.shape)}"
        raise ModelError(f"{part.name} in {path}: got {found}, expected shape {num_blocks}")
    device = part.target.device
    first, rest = part.start // BLOCK, part.start % BLOCK
    blocks = slice(first, -(-part.stop // BLOCK))
    scale = (scale[blocks] if part.dim == 0 else scale[:, blocks]).to(device)
    if isinstance(part.target, Quantized) and part.target.in_blocks:
        copy_into(part.target, Quantized(tensor, scale))
        return
    padding = (rest, 0, 0, 0) if part.dim else (0, 0, rest, 0)
    values = functional.pad(tensor.to(device).float(), padding)  # padded to the start of a block
    wide = Quantized(values, scale).dequantized()
    copy_into(part.target, wide[:, rest:] if part.dim else wide[rest:])
