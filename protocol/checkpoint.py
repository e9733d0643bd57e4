"""Facts of a Hugging Face checkpoint, read from its JSON files without torch or transformers."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from penstock.protocol.sampling import SamplingParams

T = TypeVar("T")
ARCHITECTURE = "Qwen3ForCausalLM"


class ModelError(Exception):
    """A checkpoint that can't be served, and why."""


class ModelConfig(Struct, kw_only=True, frozen=True):
    """The fields of `config.json` that the pipeline uses; named as there."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_parameters: dict[str, Any] | None = None
    """where transformers 5 keeps `rope_theta`"""
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_id: int | list[int] | None = None

    @property
    def rope_base(self) -> float:
        """RoPE's theta, from wherever the checkpoint keeps it."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))


class GenerationConfig(Struct, kw_only=True, frozen=True):
    """The fields of `generation_config.json` that the pipeline uses."""

    eos_token_id: int | list[int] | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def fill(self, sampling: SamplingParams) -> None:
        """Puts the model's defaults where the request says nothing."""
        if sampling.temperature is None:
            sampling.temperature = (self.temperature or 1.0) if self.do_sample else 0.0
        for field, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(sampling, field) is None:
                default = getattr(self, field) if self.do_sample else None
                setattr(sampling, field, neutral if default is None else default)
        if sampling.repetition_penalty is None:
            sampling.repetition_penalty = self.repetition_penalty or 1.0


def read_model_config(folder: Path) -> ModelConfig:
    """Raises ModelError for a missing folder, another architecture, or what is not supported."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist")
    config = _read(folder / "config.json", ModelConfig)
    if ARCHITECTURE not in config.architectures:
        raise ModelError(f"{folder} is a {config.architectures}; {ARCHITECTURE} is served")
    rope_type = (config.rope_parameters or config.rope_scaling or {}).get("rope_type", "default")
    if rope_type != "default":
        raise ModelError(f"{folder} has rope_type {rope_type!r}; 'default' is served")
    if config.attention_bias:
        raise ModelError(f"{folder} has attention_bias; Qwen3 without it is served")
    return config


def check_tp(config: ModelConfig, tp_size: int) -> None:
    """Raises ModelError where the model can't be cut into `tp_size` equal parts."""
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, field) % tp_size:
            raise ModelError(f"{field} {getattr(config, field)} does not divide by tp {tp_size}")


def read_generation_config(folder: Path) -> GenerationConfig:
    """All defaults where the file is missing."""
    path = folder / "generation_config.json"
    return _read(path, GenerationConfig) if path.exists() else GenerationConfig()


def eos_token_ids(model: ModelConfig, generation: GenerationConfig) -> list[int]:
    """Every id that ends a text; `generation_config.json` wins over `config.json`."""
    ids = generation.eos_token_id if generation.eos_token_id is not None else model.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids


def _read(path: Path, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
