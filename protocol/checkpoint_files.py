"""Files of a checkpoint other than `config.json`, checked before any process starts.

Only the headers of the safetensors files are read, not the weights.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from safetensors import SafetensorError, safe_open

from penstock.protocol.checkpoint import ModelConfig, ModelError, hint_of, read_bytes, read_json
from penstock.protocol.tokenizer_file import (
    TokenizerConfig,
    read_chat_templates,
    read_generation_config,
    read_tokenizer_file,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TIED = "lm_head.weight"  # tensor of some checkpoints that is ignored: the embedding is used
# frequencies in files of old versions of transformers; ours are computed from config.json
COMPUTED = "rotary_emb.inv_freq"
BARE = "embed_tokens.weight"  # in embedding models, whose tensor names lack `model.`
# suffixes of the names of packed matrices; other matrices end in `.weight`
MATRICES = (".qweight", ".weight_packed")
BIAS = ".bias"
# endings of the names of tensors with a matrix of all experts, and the matrices' modules
_FUSED = {".gate_up_proj": ("gate_proj", "up_proj"), ".down_proj": ("down_proj",)}
_SCORES = ("score.", "classifier.")
MTP = "mtp."  # beginning of the names of the tensors of multi-token prediction
# beginnings of the names of tensors that are not read: the vision part, and without
# `--speculative-method mtp` multi-token prediction
UNREAD = ("model.visual.", "visual.", MTP)
# suffixes of the names of tensors that accompany a quantized matrix, or activations in e4m3
_PARTS = (
    *(".scales", ".qzeros", ".g_idx"),
    *(".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    *(".input_scale", ".k_scale", ".v_scale"),
)
# files whose absence changes how a model is served, so that a broken link is an error
_OPTIONAL_FILES = (
    *("tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", INDEX_FILE),
)
_FLOATS = ("BF16", "F16", "F32", "F64", "F8_E4M3")
# with the types of packed weights, and of their zero points, groups and shapes
_PACKED_TYPES = (*_FLOATS, "I8", "I32", "I64")
_INTEGERS_HINT = "; integers need `quantization_config` in config.json, also if another file has it"
# name, shape, and the fields of config.json from which the shape follows
Expected = tuple[str, list[int], str]


class FusedPart(NamedTuple):
    """Rows of an expert's matrix in a tensor of all experts, [experts, rows, columns]."""

    tensor: str
    expert: int
    start: int
    stop: int


class Index(Struct):
    """The index of a sharded checkpoint."""

    weight_map: dict[str, str]  # tensor → file name


def check_files(folder: Path, config: ModelConfig, weights: Iterable[Expected] | None) -> None:
    """Raise ModelError for a file that is missing or damaged.

    weights: tensors of the model; None: the pipeline does not read the weights.
    """
    for path in map(folder.joinpath, _OPTIONAL_FILES):
        if path.is_symlink() and not path.exists():
            raise ModelError(f"{path} is a link to a missing file; download it again, or remove it")
    read_tokenizer_file(folder)
    read_chat_templates(folder)
    if (folder / "tokenizer_config.json").exists():
        read_json(folder / "tokenizer_config.json", TokenizerConfig)
    read_generation_config(folder)
    if weights is not None:
        check_tensors(folder, config, weights)


def check_tensors(folder: Path, config: ModelConfig, weights: Iterable[Expected]) -> None:
    """Raise ModelError for a damaged file, and for tensors that `config` contradicts.

    Shapes of packed matrices and of scales are checked when they are loaded.
    """
    tensors = _unfused(_read_shapes(folder, _PACKED_TYPES if config.is_packed else _FLOATS))
    path = folder / "config.json"
    if config.is_embedding_model and BARE in tensors:
        tensors = {f"model.{name}": shape for name, shape in tensors.items()}
    names: dict[str, None] = {}
    for name, shape, fields in weights:
        names[name] = None
        if name in tensors and tensors[name] != shape:
            found = f"{name} has the shape {tensors[name]}, expected {shape}"
            raise ModelError(f"{path}: {fields}: {found}")
    num_layers = _num_layers(names, tensors)
    if num_layers != config.num_hidden_layers:
        found = f"got {config.num_hidden_layers}, expected {num_layers}, as the weights have"
        raise ModelError(f"{path}: num_hidden_layers: {found}")
    found_weights = weight_names(tensors)
    if TIED in names and TIED not in found_weights:
        found = "got false, expected true, as lm_head.weight is missing"
        raise ModelError(f"{path}: tie_word_embeddings: {found}")
    check_names(folder, set(names), found_weights)


def is_fused(name: str) -> bool:
    """Return True if a tensor has a matrix of all experts."""
    return name.endswith(tuple(f".experts{end}" for end in _FUSED))


def fused_parts(shapes: Mapping[str, Sequence[int]]) -> dict[str, FusedPart]:
    """Return the places of experts' weights in tensors for which `is_fused` is true, by name."""
    parts = {}
    for tensor, (num_experts, num_rows, _) in shapes.items():
        module, _, end = tensor.rpartition(".")
        names = _FUSED[f".{end}"]
        size = num_rows // len(names)
        for expert in range(num_experts):
            for place, name in enumerate(names):
                part = FusedPart(tensor, expert, place * size, (place + 1) * size)
                parts[f"{module}.{expert}.{name}.weight"] = part
    return parts


def _unfused(tensors: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the shapes of tensors, with an entry for each expert's matrix."""
    fused = {name: shape for name, shape in tensors.items() if is_fused(name) and len(shape) == 3}
    parts = {
        name: [part.stop - part.start, fused[part.tensor][2]]
        for name, part in fused_parts(fused).items()
    }
    return {name: shape for name, shape in tensors.items() if name not in fused} | parts


def _num_layers(expected: Iterable[str], tensors: Iterable[str]) -> int:
    """Return the number of layers in a checkpoint, counted by the first weight of each layer."""
    first = next(name for name in expected if ".layers.0." in name)
    pattern = re.compile(re.escape(first).replace(r"\.0\.", r"\.\d+\.", 1))
    return sum(bool(pattern.fullmatch(name)) for name in tensors)


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor; None if all are in `SINGLE_FILE`. Raises ModelError.

    Next to `SINGLE_FILE`, an index that does not name this file belongs to older shards. Like
    transformers, the pipeline does not read such an index.
    """
    if not (folder / INDEX_FILE).exists():
        return None
    files = read_json(folder / INDEX_FILE, Index).weight_map
    is_stale = (folder / SINGLE_FILE).exists() and SINGLE_FILE not in files.values()
    return None if is_stale else files


def weight_files(folder: Path) -> list[str]:
    """Return the names of a checkpoint's weight files. Raises ModelError."""
    files = read_index(folder)
    return [SINGLE_FILE] if files is None else sorted(set(files.values()))


def _read_shapes(folder: Path, types: Collection[str]) -> dict[str, list[int]]:
    """Return the shapes of all tensors. Raises ModelError, also for a type not in `types`."""
    index, files = folder / INDEX_FILE, read_index(folder)
    if files is None:
        if not (folder / SINGLE_FILE).exists():
            _check_format(folder)
        return _read_header(folder / SINGLE_FILE, types)
    for name, file in files.items():
        if Path(file).name != file or file in ("", "..") or "\0" in file:
            raise ModelError(f"{index}: {name}: got {file!r}, expected a file of its folder")
    headers = {file: _read_header(folder / file, types) for file in weight_files(folder)}
    for name, file in files.items():
        if name not in headers[file]:
            raise ModelError(f"{index}: got {name} in {file}, which has no such tensor")
    return {name: headers[file][name] for name, file in files.items()}


def _check_format(folder: Path) -> None:
    """Refuse pickled weights, which can run code, and shards without index. Raises ModelError."""
    if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
        raise ModelError(f"{folder}: got {shards[0]} without {INDEX_FILE}; download that, too")
    pickled = sorted(path.name for path in folder.glob("*.bin*"))
    if pickled:
        raise ModelError(
            f"{folder}: got {pickled[0]}, expected {SINGLE_FILE}; load it with transformers and "
            "save it with `save_pretrained`"
        )


def _read_header(path: Path, types: Collection[str]) -> dict[str, list[int]]:
    """Return the shapes of a file's tensors. Raises ModelError, also for a type not in `types`."""
    start = read_bytes(path, 64)
    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ModelError(f"{path} is not valid safetensors: {reason}{hint_of(start)}") from error
    for name, tensor in tensors.items():
        if (found := tensor.get_dtype()) not in types:
            hint = _INTEGERS_HINT if found in _PACKED_TYPES else ""
            raise ModelError(f"{path}: {name}: got {found}, expected {', '.join(types)}{hint}")
    return {name: tensor.get_shape() for name, tensor in tensors.items()}


def weight_names(names: Iterable[str]) -> set[str]:
    """Return the names of the weights among tensors; a packed tensor counts as its weight.

    Packed weights may have a bias, because AutoGPTQ wrote a bias for all layers.
    """
    names = [name for name in names if not name.endswith(_PARTS)]
    packed = {name.removesuffix(end) for name in names for end in MATRICES if name.endswith(end)}
    parts = {name + end for name in packed for end in (*MATRICES, BIAS)}
    return {*names} - parts | {f"{name}.weight" for name in packed}


def has_mtp(folder: Path) -> bool:
    """Return True if a folder has a checkpoint with tensors of multi-token prediction."""
    try:
        if names := read_index(folder):
            return any(name.startswith(MTP) for name in names)
        with safe_open(folder / SINGLE_FILE, framework="np") as file:
            return any(name.startswith(MTP) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError, ModelError):
        return False


def check_names(folder: Path, wanted: set[str], found: set[str]) -> None:
    """Raise ModelError for weights that are missing or unknown."""
    missing, unknown = wanted - found, found - wanted - {TIED}
    if any(name.startswith(MTP) for name in wanted) and not any(
        name.startswith(MTP) for name in found
    ):
        raise ModelError(
            f"speculative_method: got mtp, expected none or ngram: {folder} lacks the layer of "
            f"multi-token prediction, tensors {MTP}*"
        )
    unknown = {name for name in unknown if not name.endswith(COMPUTED)}
    unknown = {name for name in unknown if not name.startswith(UNREAD)}
    if missing and BARE in found:
        raise ModelError(
            f"{folder} has {BARE} without 'model.' before it, as embedding models have, and no "
            "modules.json; download the whole checkpoint, or give one of Qwen3ForCausalLM"
        )
    if any(name.startswith(_SCORES) for name in unknown):
        raise ModelError(
            f"{folder} has {min(unknown)}: a reranker or classifier, which scores texts and "
            "generates none; give a checkpoint of Qwen3ForCausalLM"
        )
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} tensors, such as {min(missing)}")
    if unknown:
        raise ModelError(f"{folder} has {len(unknown)} unknown tensors, such as {min(unknown)}")
