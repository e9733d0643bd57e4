"""Tensors of a checkpoint by name: safetensors, in one file or sharded."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.protocol.checkpoint import ModelConfig, ModelError
from penstock.protocol.checkpoint_files import SINGLE_FILE, read_index
from penstock.protocol.expected_weights import MATRICES, TIED, weight_names

log = logging.getLogger(__name__)
EMBEDDING = "model.embed_tokens.weight"
_FLOATS = ("F16", "BF16", "F32")


class CheckpointTensors:
    """The tensors of a folder. Files are opened once. All methods raise ModelError."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """prefix: of the model's names, which those in the files lack."""
        self._prefix = prefix
        single, weight_map = folder / SINGLE_FILE, read_index(folder)
        self._open: dict[Path, Any] = {}
        try:
            if weight_map is not None:
                self.files = {name: folder / file for name, file in weight_map.items()}
            else:
                self._open[single] = safe_open(single, framework="pt")
                self.files = dict.fromkeys(self._open[single].keys(), single)
            self.files = {prefix + name: file for name, file in self.files.items()}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{folder}: could not read the weights: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def weights(self) -> set[str]:
        """Return the names of all weights: of a packed one, what it stands for."""
        return weight_names(self.files)

    def matrix(self, weight: str) -> str:
        """Return the name of the tensor with the numbers of a weight."""
        module = weight.removesuffix(".weight")
        return next((module + end for end in MATRICES if module + end in self.files), weight)

    def file(self, name: str) -> Path:
        """Return the file of a tensor."""
        if name not in self.files:
            raise ModelError(f"the checkpoint lacks {name}")
        return self.files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def check_scale(self, name: str) -> None:
        """Raise ModelError unless a tensor has a type of scales."""
        found = self._slice(name).get_dtype()
        if found not in _FLOATS:
            raise ModelError(f"{name}: got {found}, expected one of {', '.join(_FLOATS)}")

    def read(self, name: str, *cuts: slice) -> Tensor:
        """Return a part of a tensor of one or two dimensions, or all of it."""
        source = self._slice(name)
        try:
            if cuts:
                tensor: Tensor = source[cuts]
            else:
                stored = name.removeprefix(self._prefix)
                tensor = self._open[self.files[name]].get_tensor(stored)
            return tensor
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.files[name]}: could not read the file: {error}") from error

    def _slice(self, name: str) -> Any:
        path = self.file(name)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_slice(name.removeprefix(self._prefix))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: could not read the file: {error}") from error


def with_own_head(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return a model that has the output layer of its checkpoint, if that is not the embedding.

    So does transformers, whatever `tie_word_embeddings` says. Raises ModelError.
    """
    if not config.tie_word_embeddings or config.is_embedding_model:
        return config
    tensors = CheckpointTensors(folder)
    if TIED not in tensors or EMBEDDING not in tensors:
        return config
    head, embedding = tensors.read(TIED), tensors.read(EMBEDDING)
    if head.dtype == embedding.dtype and torch.equal(_words(head), _words(embedding)):
        return config
    log.warning(
        "tie_word_embeddings: got true, but %s differs from the embedding: it is used", TIED
    )
    return msgspec.structs.replace(config, tie_word_embeddings=False)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as large integers, which are compared five times as fast."""
    raw = tensor.view(torch.uint8).flatten()
    return raw.view(torch.int64) if len(raw) % 8 == 0 else raw
