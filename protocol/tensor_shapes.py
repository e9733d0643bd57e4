"""Shapes of a checkpoint's tensors, read from the headers of its safetensors files.

They are compared with `config.json` before a worker starts and loads the weights.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.protocol.checkpoint import ModelConfig, ModelError, read_json

_MAX_HEADER_BYTES = 100_000_000
"""by the format of safetensors"""


class _Index(Struct):
    weight_map: dict[str, str]


class _Tensor(Struct):
    shape: list[int] = []


def check_shapes(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError where a tensor has not the shape that `config` gives it.

    Tensors that are missing are reported when the weights are loaded.
    """
    hidden, head = config.hidden_size, config.head_dim
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
        found = _shape(folder, name)
        if found not in (None, shape):
            raise ModelError(
                f"{folder / 'config.json'}: {fields}: {name} has the shape {found}, "
                f"expected {shape}"
            )


def _shape(folder: Path, name: str) -> list[int] | None:
    index = folder / "model.safetensors.index.json"
    files = read_json(index, _Index).weight_map if index.exists() else {}
    path = folder / files.get(name, "model.safetensors")
    if not path.exists():
        return None
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MAX_HEADER_BYTES))
    try:
        tensor = msgspec.json.decode(header, type=dict[str, _Tensor]).get(name)
    except msgspec.MsgspecError:
        return None  # loading the file reports it
    return None if tensor is None else tensor.shape
