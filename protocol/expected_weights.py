"""Names and shapes of the tensors that a checkpoint of Qwen3 has, by its configuration."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.protocol.checkpoint import ModelConfig, ModelError

TIED = "lm_head.weight"  # tensor that some checkpoints have although the embedding is used
# frequencies that old versions of transformers wrote; computed from config.json
COMPUTED = "rotary_emb.inv_freq"
BARE = "embed_tokens.weight"  # as embedding models have it, whose names lack `model.`
# ends of the names of packed matrices; others end in `.weight`
MATRICES = (".qweight", ".weight_packed")
BIAS = ".bias"
_SCORES = ("score.", "classifier.")
# ends of the names of what belongs to a quantized matrix, or to activations in e4m3
_PARTS = (
    *(".scales", ".qzeros", ".g_idx"),
    *(".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    *(".input_scale", ".k_scale", ".v_scale"),
)


class ExpectedWeight(NamedTuple):
    """A weight of the model."""

    name: str
    shape: list[int]
    fields: str  # of config.json, from which the shape follows


def expected_weights(config: ModelConfig) -> Iterator[ExpectedWeight]:
    """Yield every weight."""
    hidden = config.hidden_size
    vocabulary = [config.vocab_size, hidden], "vocab_size and hidden_size"
    yield ExpectedWeight("model.embed_tokens.weight", *vocabulary)
    if not config.tie_word_embeddings:
        yield ExpectedWeight(TIED, *vocabulary)
    yield ExpectedWeight("model.norm.weight", [hidden], "hidden_size")
    for layer in range(config.num_hidden_layers):
        for name, shape, fields in (*_attention(config), *_mlp(config, config.is_sparse(layer))):
            yield ExpectedWeight(f"model.layers.{layer}.{name}.weight", shape, fields)


def _attention(config: ModelConfig) -> Iterator[tuple[str, list[int], str]]:
    hidden, head = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads * head, config.num_key_value_heads * head
    yield from ((f"self_attn.{one}_norm", [head], "head_dim") for one in "qk")
    fields = "num_attention_heads times head_dim"
    yield "self_attn.q_proj", [heads, hidden], fields
    yield "self_attn.k_proj", [kv_heads, hidden], "num_key_value_heads times head_dim"
    yield "self_attn.v_proj", [kv_heads, hidden], "num_key_value_heads times head_dim"
    yield "self_attn.o_proj", [hidden, heads], fields
    yield "input_layernorm", [hidden], "hidden_size"
    yield "post_attention_layernorm", [hidden], "hidden_size"


def _mlp(config: ModelConfig, is_sparse: bool) -> Iterator[tuple[str, list[int], str]]:
    hidden, field, size = config.hidden_size, "intermediate_size", config.intermediate_size
    parents = ["mlp"]
    if is_sparse:
        yield "mlp.gate", [config.expert_count, hidden], "num_experts"
        field, size = "moe_intermediate_size", config.moe_intermediate_size
        parents = [f"mlp.experts.{number}" for number in range(config.expert_count)]
    for parent in parents:
        yield f"{parent}.gate_proj", [size, hidden], field
        yield f"{parent}.up_proj", [size, hidden], field
        yield f"{parent}.down_proj", [hidden, size], field


def weight_names(names: Iterable[str]) -> set[str]:
    """Return the names of the weights among tensors: of a packed one, what it stands for.

    Packed ones may have a bias, which AutoGPTQ wrote for all layers.
    """
    names = [name for name in names if not name.endswith(_PARTS)]
    packed = {name.removesuffix(end) for name in names for end in MATRICES if name.endswith(end)}
    parts = {name + end for name in packed for end in (*MATRICES, BIAS)}
    return {*names} - parts | {f"{name}.weight" for name in packed}


def check_names(folder: Path, wanted: set[str], found: set[str]) -> None:
    """Raise ModelError for weights that are missing or unknown."""
    missing, unknown = wanted - found, found - wanted - {TIED}
    unknown = {name for name in unknown if not name.endswith(COMPUTED)}
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
