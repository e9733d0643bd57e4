"""Facts of a Hugging Face checkpoint, read from its JSON files without torch or transformers."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.sampling import SamplingParams

T = TypeVar("T")
ARCHITECTURE = "Qwen3ForCausalLM"
MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
"""what `quantization_config` must say: a scale for each such block of a weight"""


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
    quantization_config: dict[str, Any] | None = None
    """of weights in 8 bits"""
    # of Qwen3MoeForCausalLM
    num_experts: int = 128
    num_local_experts: int | None = None
    """`num_experts` as transformers 5 calls it"""
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, Meta(ge=1)] = 1
    mlp_only_layers: list[int] | None = None

    @property
    def expert_count(self) -> int:
        """Experts of a sparse layer, whatever the checkpoint calls them; 0: no layer has any."""
        if MOE_ARCHITECTURE not in self.architectures:
            return 0
        return self.num_experts if self.num_local_experts is None else self.num_local_experts

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is made of experts."""
        is_dense = layer in (self.mlp_only_layers or ()) or (layer + 1) % self.decoder_sparse_step
        return self.expert_count > 0 and not is_dense

    @property
    def is_fp8(self) -> bool:
        """Whether the weights of the layers are served in 8 bits."""
        return self.quantization_config is not None

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
    if not {ARCHITECTURE, MOE_ARCHITECTURE} & set(config.architectures):
        served = f"{ARCHITECTURE} is served, and {MOE_ARCHITECTURE}"
        raise ModelError(f"{folder} is a {config.architectures}; {served}")
    rope_type = (config.rope_parameters or config.rope_scaling or {}).get("rope_type", "default")
    if rope_type != "default":
        raise ModelError(f"{folder} has rope_type {rope_type!r}; 'default' is served")
    if config.attention_bias:
        raise ModelError(f"{folder} has attention_bias; Qwen3 without it is served")
    quantization = config.quantization_config or FP8_BLOCKS
    found = {name: quantization.get(name) for name in FP8_BLOCKS}
    if found != FP8_BLOCKS:
        raise ModelError(f"{folder} is quantised by {found}; {FP8_BLOCKS} is served")
    if config.expert_count and not 1 <= config.num_experts_per_tok <= config.expert_count:
        raise ModelError(
            f"{folder} has num_experts_per_tok {config.num_experts_per_tok}; "
            f"1 to {config.expert_count}, the number of experts, is possible"
        )
    return config


def quantized(config: ModelConfig, quantization: str) -> ModelConfig:
    """The model as `--quantization` wants it."""
    if quantization == "fp8" and not config.is_fp8:
        return msgspec.structs.replace(config, quantization_config=FP8_BLOCKS)
    return config


def check_tp(config: ModelConfig, tp_size: int, expert_parallel: bool = False) -> None:
    """Raises ModelError where the model can't be cut into `tp_size` equal parts.

    expert_parallel: whole experts are spread, not parts of every one.
    """
    sparse = [config.is_sparse(layer) for layer in range(config.num_hidden_layers)]
    if expert_parallel and not any(sparse):
        raise ModelError("enable_expert_parallel needs a model with experts; this one has none")
    sizes = {"num_attention_heads": config.num_attention_heads}
    if tp_size % config.num_key_value_heads:  # else several ranks have the same one
        sizes["num_key_value_heads"] = config.num_key_value_heads
    if not all(sparse):
        sizes["intermediate_size"] = config.intermediate_size
    if expert_parallel:
        sizes["num_experts"] = config.expert_count
    elif any(sparse):
        sizes["moe_intermediate_size"] = config.moe_intermediate_size
    for name, size in sizes.items():
        if size % tp_size:
            raise ModelError(f"{name} {size} does not divide by tp {tp_size}")


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
