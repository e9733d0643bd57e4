"""The descriptions of two toy families, for processes without torch.

One has recurrent layers and layers of attention in turns. The other has no state but keys and
values: attention and SwiGLU have the same input, as in the recipe of `CONTRIBUTING.md`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.models import architecture
from penstock.models.architecture import Architecture, Axis, Family, Layer, State
from penstock.protocol import checkpoint
from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.messages.plan import STATE_WINDOW

NAME = "ToyRecurrentForCausalLM"
PARALLEL = "ToyParallelForCausalLM"
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
    inner = Axis("intermediate_size", config.intermediate_size)
    layers = []
    for index in range(config.num_hidden_layers):
        name = f"model.layers.{index}"
        norm = architecture.vector(f"{name}.input_layernorm", hidden, "hidden_size")
        if PARALLEL in config.architectures:
            mlp = architecture.mlp(f"{name}.mlp", config, norm)
            layers.append(architecture.attention(f"{name}.attn", config, norm))
            layers.append(mlp._replace(weights=mlp.weights[1:]))  # the norm is attention's
            continue
        if index % 2:
            layers.append(architecture.attention(f"{name}.attn", config, norm))
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
    """Serve the toy families in this process."""
    for name in {NAME, PARALLEL}.difference(checkpoint.SERVED):
        checkpoint.SERVED.append(name)
        architecture.FAMILIES[name] = Family(describe, "tests.models.toy.model")


@contextmanager
def registered() -> Iterator[None]:
    """Serve the toy families for a time: other tests of this process name what is served."""
    register()
    yield
    for name in NAME, PARALLEL:
        checkpoint.SERVED.remove(name)
        del architecture.FAMILIES[name]
