"""Files of a checkpoint besides `config.json`, checked before any process starts.

Of the weights only the headers of the safetensors files are read.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.checkpoint import ModelConfig, ModelError, hint_of, read_bytes, read_json
from penstock.protocol.expected_weights import (
    BARE,
    TIED,
    check_names,
    expected_weights,
    weight_names,
)
from penstock.protocol.generation_config import read_generation_config
from penstock.protocol.tokenizer_file import (
    TokenizerConfig,
    read_chat_template,
    read_tokenizer_file,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_OPTIONAL_FILES = (
    *("tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", INDEX_FILE),
)
"""without one of them a model is served otherwise, so that none may be a broken link"""
_MAX_HEADER_BYTES = 100_000_000
"""by the format of safetensors"""
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1}
"""bytes of a number of each type"""
_SIZES = _FLOATS | {"I8": 1, "I32": 4, "I64": 8}
"""likewise, with those of packed weights, their zero points, groups and shapes"""
_INTEGERS_HINT = "; integers need `quantization_config` in config.json, also if another file has it"


class _Index(Struct):
    weight_map: dict[str, str]
    """tensor → file name"""


class _Tensor(Struct):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[int, int]


def check_files(folder: Path, config: ModelConfig, *, weights: bool) -> None:
    """Raise ModelError for a file that is missing or damaged.

    weights: whether the pipeline reads them, too.
    """
    for path in map(folder.joinpath, _OPTIONAL_FILES):
        if path.is_symlink() and not path.exists():
            raise ModelError(f"{path} is a link to a missing file; download it again, or remove it")
    read_tokenizer_file(folder)
    read_chat_template(folder)
    if (folder / "tokenizer_config.json").exists():
        read_json(folder / "tokenizer_config.json", TokenizerConfig)
    read_generation_config(folder)
    if weights:
        check_tensors(folder, config)


def check_tensors(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError for a damaged file, and for tensors that `config` contradicts.

    Shapes of packed matrices and of scales are checked when they are loaded.
    """
    is_packed = config.is_packed
    tensors = _read_tensors(folder, _SIZES if is_packed else _FLOATS)
    path = folder / "config.json"
    if config.is_embedding_model and BARE in tensors:
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    names = set()
    for name, shape, fields in expected_weights(config):
        names.add(name)
        if name in tensors and tensors[name].shape != shape:
            found = f"{name} has the shape {tensors[name].shape}, expected {shape}"
            raise ModelError(f"{path}: {fields}: {found}")
    num_layers = sum(name.endswith(".input_layernorm.weight") for name in tensors)
    if num_layers != config.num_hidden_layers:
        found = f"got {config.num_hidden_layers}, expected {num_layers}, as the weights have"
        raise ModelError(f"{path}: num_hidden_layers: {found}")
    weights = weight_names(tensors)
    if TIED in names and TIED not in weights:
        found = "got false, expected true, as lm_head.weight is missing"
        raise ModelError(f"{path}: tie_word_embeddings: {found}")
    check_names(folder, names, weights)


def _read_tensors(folder: Path, sizes: Mapping[str, int]) -> dict[str, _Tensor]:
    """Return all tensors by name. Raises ModelError, also for types without a size."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            _check_format(folder)
        return _read_header(folder / SINGLE_FILE, sizes)
    files = read_json(index, _Index).weight_map
    for name, file in files.items():
        if Path(file).name != file or file in ("", "..") or "\0" in file:
            raise ModelError(f"{index}: {name}: got {file!r}, expected a file of its folder")
    headers = {file: _read_header(folder / file, sizes) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise ModelError(f"{index}: got {name} in {file}, which has no such tensor")
    return {name: headers[file][name] for name, file in files.items()}


def _check_format(folder: Path) -> None:
    """Refuse pickled weights, which can run code, and shards. Raises ModelError."""
    if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
        raise ModelError(f"{folder}: got {shards[0]} without {INDEX_FILE}; download that, too")
    pickled = sorted(path.name for path in folder.glob("*.bin*"))
    if pickled:
        raise ModelError(
            f"{folder}: got {pickled[0]}, expected {SINGLE_FILE}; load it with transformers and "
            "save it with `save_pretrained`"
        )


def _read_header(path: Path, sizes: Mapping[str, int]) -> dict[str, _Tensor]:
    start = read_bytes(path, 64)
    size, found = int.from_bytes(start[:8], "little"), path.stat().st_size
    content = read_bytes(path, 8 + min(size, _MAX_HEADER_BYTES))[8:] if size < found else b""
    try:
        entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"got no header of safetensors ({error}){hint_of(start)}"
        raise ModelError(f"{path}: {problem}") from error
    expected = 8 + size + max((one.data_offsets[1] for one in tensors.values()), default=0)
    if found != expected:
        raise ModelError(f"{path}: got {found} bytes, expected {expected}; download it again")
    _check_layout(path, tensors, sizes)
    return tensors


def _check_layout(path: Path, tensors: dict[str, _Tensor], sizes: Mapping[str, int]) -> None:
    """Raise ModelError unless each tensor has a known type, and follows the one before it."""
    begin = 0
    for name, tensor in sorted(tensors.items(), key=lambda one: one[1].data_offsets):
        if tensor.dtype not in sizes:
            problem = f"got {tensor.dtype}, expected {', '.join(sizes)}"
            hint = _INTEGERS_HINT if tensor.dtype in _SIZES else ""
            raise ModelError(f"{path}: {name}: {problem}{hint}")
        expected = begin, begin + sizes[tensor.dtype] * math.prod(tensor.shape)
        if tensor.data_offsets != expected:
            problem = f"got the bytes {list(tensor.data_offsets)}, expected {list(expected)}"
            of_what = f"for {tensor.dtype} of shape {tensor.shape} after the tensor before it"
            raise ModelError(f"{path}: {name}: {problem} {of_what}; download it again")
        begin = expected[1]
