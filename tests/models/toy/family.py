"""The description of the toy family, for processes without torch."""

from typing import Any

from penstock.models import architecture
from penstock.models.architecture import Architecture, Axis, Family, Layer, State
from penstock.protocol import checkpoint
from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.messages.plan import STATE_WINDOW

NAME = "ToyRecurrentForCausalLM"
SHAPE: dict[str, Any] = {
    "architectures": [NAME],
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def describe(config: ModelConfig) -> Architecture:
    hidden = config.hidden_size
    heads = Axis("num_attention_heads", config.num_attention_heads, config.head_dim)
    kv_heads = Axis("num_key_value_heads", config.num_key_value_heads, config.head_dim, "shared")
    inner = Axis("intermediate_size", config.intermediate_size)
    layers = []
    for index in range(config.num_hidden_layers):
        name = f"model.layers.{index}"
        norm = architecture.vector(f"{name}.input_layernorm", hidden, "hidden_size")
        if index % 2:
            layers.append(architecture.attention(f"{name}.attn", hidden, heads, kv_heads, norm))
            continue
        weights = (
            norm,
            architecture.columns(f"{name}.recurrent.x_proj", [inner], hidden, inner.field),
            architecture.columns(f"{name}.recurrent.g_proj", [inner], hidden, inner.field),
            architecture.rows(f"{name}.recurrent.out_proj", hidden, inner, inner.field),
        )
        state = State((inner,), ()), State((inner,), (STATE_WINDOW, 2))
        layers.append(Layer("recurrent", weights, state=state))
    return architecture.decoder(config, layers)


def register() -> None:
    """Serve the toy family in this process."""
    if NAME not in checkpoint.SERVED:
        checkpoint.SERVED.append(NAME)
        architecture.FAMILIES[NAME] = Family(describe, "tests.models.toy.model")
