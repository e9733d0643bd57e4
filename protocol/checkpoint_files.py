"""Files of a checkpoint besides `config.json`, checked before any process starts.

Of the weights only the headers of the safetensors files are read.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.protocol.checkpoint import ModelConfig, ModelError, hint_of, read_bytes, read_json
from penstock.protocol.generation_config import read_generation_config
from penstock.protocol.tokenizer_file import TokenizerConfig, read_tokenizer_file

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_BARE = "embed_tokens.weight"
"""as embedding models have it, whose names lack `model.`"""
_MAX_HEADER_BYTES = 100_000_000
"""by the format of safetensors"""
_DTYPES = ("BF16", "F16", "F32", "F64", "F8_E4M3")
_INTEGERS = ("I8", "I32", "I64")
"""of packed weights, their zero points, groups and shapes"""


class _Index(Struct):
    weight_map: dict[str, str]
    """tensor → file name"""


class _Tensor(Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def check_files(folder: Path, config: ModelConfig, *, weights: bool) -> None:
    """Raise ModelError for a file that is missing or damaged.

    weights: whether the pipeline reads them, too.
    """
    read_tokenizer_file(folder)
    if (folder / "tokenizer_config.json").exists():
        read_json(folder / "tokenizer_config.json", TokenizerConfig)
    read_generation_config(folder)
    if weights:
        check_tensors(folder, config)


def check_tensors(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError for a damaged file, and for a tensor without the shape by `config`.

    Tensors that are missing are reported when the weights are loaded.
    """
    is_packed = config.weight_format is not None and not config.fp8
    tensors = _read_tensors(folder, _DTYPES + _INTEGERS if is_packed else _DTYPES)
    path, hidden, head = folder / "config.json", config.hidden_size, config.head_dim
    if config.is_embedding_model and _BARE in tensors:
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    attention = "model.layers.0.self_attn"
    for name, shape, fields in (
        ("model.embed_tokens.weight", [config.vocab_size, hidden], "vocab_size and hidden_size"),
        (f"{attention}.q_norm.weight", [head], "head_dim"),
        (
            f"{attention}.q_proj.weight",
            [config.num_attention_heads * head, hidden],
            "num_attention_heads times head_dim",
        ),
        (
            f"{attention}.k_proj.weight",
            [config.num_key_value_heads * head, hidden],
            "num_key_value_heads times head_dim",
        ),
    ):
        if name in tensors and tensors[name].shape != shape:
            found = f"{name} has the shape {tensors[name].shape}, expected {shape}"
            raise ModelError(f"{path}: {fields}: {found}")
    num_layers = sum(name.endswith(".input_layernorm.weight") for name in tensors)
    if num_layers != config.num_hidden_layers:
        found = f"got {config.num_hidden_layers}, expected {num_layers}, as the weights have"
        raise ModelError(f"{path}: num_hidden_layers: {found}")
    if not config.tie_word_embeddings and "lm_head.weight" not in tensors:
        found = "got false, expected true, as lm_head.weight is missing"
        raise ModelError(f"{path}: tie_word_embeddings: {found}")


def _read_tensors(folder: Path, dtypes: tuple[str, ...]) -> dict[str, _Tensor]:
    """Return all tensors by name. Raises ModelError, also for other dtypes."""
    index = folder / INDEX_FILE
    if not index.exists():
        return _read_header(folder / SINGLE_FILE, dtypes)
    files = read_json(index, _Index).weight_map
    headers = {file: _read_header(folder / file, dtypes) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise ModelError(f"{index}: got {name} in {file}, which has no such tensor")
    return {name: headers[file][name] for name, file in files.items()}


def _read_header(path: Path, dtypes: tuple[str, ...]) -> dict[str, _Tensor]:
    start = read_bytes(path, 64)
    size, found = int.from_bytes(start[:8], "little"), path.stat().st_size
    content = read_bytes(path, 8 + min(size, _MAX_HEADER_BYTES))[8:] if size < found else b""
    try:
        entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"got no header of safetensors ({error}){hint_of(start)}"
        raise ModelError(f"{path}: {problem}") from error
    expected = 8 + size + max((one.data_offsets[1] for one in tensors.values()), default=0)
    if found != expected:
        raise ModelError(f"{path}: got {found} bytes, expected {expected}; download it again")
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            expected_types = ", ".join(dtypes)
            raise ModelError(f"{path}: {name}: got {tensor.dtype}, expected {expected_types}")
    return tensors
