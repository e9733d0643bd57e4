"""Embedding models, known by the files that sentence-transformers keeps next to the checkpoint."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

ARCHITECTURE = "Qwen3Model"  # of a checkpoint that was saved without an output layer
_SERVED = {"Transformer", "Pooling", "Normalize"}
# fields of a pooling of the last token, as written before and since sentence-transformers 5.4
_LAST_TOKEN = ("pooling_mode_lasttoken", True), ("pooling_mode", "lasttoken")


class _Module(Struct):
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def is_embedding_model(folder: Path) -> bool:
    """Return True if modules.json ends the model in a pooling.

    Raises ValueError for a pooling or module that is not served, OSError.
    """
    path = folder / "modules.json"
    if not path.exists():
        return False
    modules = _read(path, list[_Module])
    pooling = next((one for one in modules if one.name == "Pooling"), None)
    if pooling is None:
        return False
    if others := [one.name for one in modules if one.name not in _SERVED]:
        raise ValueError(f"{path}: got {others[0]}, expected one of {', '.join(sorted(_SERVED))}")
    config = folder / pooling.path / "config.json"
    if config.parent == folder or not config.exists():
        raise ValueError(f"{config} is missing; an embedding model needs it")
    fields = _read(config, dict[str, Any])
    if not any(fields.get(name) == value for name, value in _LAST_TOKEN):
        modes = [name for name, value in fields.items() if "pooling_mode" in name and value]
        raise ValueError(f"{config}: got {modes}, expected a pooling of the last token")
    return True


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
