"""Qwen3.5, 3.6 and 3.8, the text part, and Qwen3-Next.

Three of four layers are gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464), which
keeps a recurrent state. The others are grouped-query attention with a gate for each feature of its
output, and RoPE on a quarter of each head. Norms multiply by 1 + weight. The second half of a layer
is SwiGLU, or a mixture of experts with one that all tokens have.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from penstock.kernels.elementwise import rms_norm
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear.linear import linear
from penstock.kernels.recurrent.delta_rule import gated_delta_rule, gated_rms_norm
from penstock.models.architecture import Architecture, Layer
from penstock.models.layers import MLP, Attention, MoE, Setup, format_of
from penstock.models.parallel import (
    ColumnParallelLinear,
    Parameter,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.quantization import WeightFormat


def joins_gates(tp: TensorParallel, weight_format: WeightFormat | None, num_gates: int) -> bool:
    """Return True if the gates, which have 16 bits, are computed with queries, keys and values.

    Only on a GPU, where it saves a kernel, and if rows stay aligned: the compiled layers of a CPU
    need other matrices. num_gates: of this rank.
    """
    return tp.device.type == "cuda" and weight_format is None and num_gates % 16 == 0


class DeltaNet(nn.Module):
    """Gated DeltaNet (`penstock.kernels.recurrent.delta_rule`); a rank has a share of the heads."""

    def __init__(self, layer: Layer, setup: Setup) -> None:
        super().__init__()
        config, tp, *_ = setup
        is_joined, out = layer.has("in_proj_qkvz"), layer.pick("out_proj")
        qkvz = layer.pick(*(["in_proj_qkvz"] if is_joined else ["in_proj_qkv", "in_proj_z"]))
        ba = layer.pick(*(["in_proj_ba"] if is_joined else ["in_proj_b", "in_proj_a"]))
        self.conv, self.a_log, self.dt_bias = (
            Parameter(tp, layer.pick(name)) for name in ("conv1d", "A_log", "dt_bias")
        )
        weight_format, num_gates = format_of(config, qkvz), 2 * len(self.a_log.weight)
        joins = joins_gates(tp, weight_format, num_gates)
        self.qkvz_proj = ColumnParallelLinear(tp, qkvz + ba if joins else qkvz, weight_format)
        self.ba_proj = None if joins else ColumnParallelLinear(tp, ba)
        (self.norm,) = map(setup.norm, layer.pick("norm"))
        self.out_proj = RowParallelLinear(tp, out, format_of(config, out))
        self.num_key_heads = qkvz[0].axes[0].units_of_rank(self.qkvz_proj.ranks)
        num_channels = len(self.conv.weight)
        sizes = num_channels, num_gates if joins else 0  # around those of z
        self.sizes = sizes[0], sum(self.qkvz_proj.sizes) - sum(sizes), sizes[1]

    def forward(
        self, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, state: Sequence[Tensor]
    ) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the layer's output for its norm."""
        qkv, z, gates = self.qkvz_proj(residual, norm).split(self.sizes, 1)
        out = gated_delta_rule(
            qkv,
            self.ba_proj(residual, norm) if self.ba_proj else gates,
            self.conv.weight.squeeze(1),
            self.a_log.weight,
            self.dt_bias.weight,
            num_key_heads=self.num_key_heads,
            batch=batch,
            state=state,
        )
        out = gated_rms_norm(out, z.view(out.shape), self.norm.weight, self.norm.eps)
        return self.out_proj(out.flatten(1), residual)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention or DeltaNet, and MLP, each with a preceding norm and the residual stream."""

    def __init__(self, mixer: Layer, mlp: Layer, shared: Layer | None, setup: Setup) -> None:
        super().__init__()
        norms = *mixer.pick("input_layernorm"), *mlp.pick("post_attention_layernorm")
        self.input_layernorm, self.post_attention_layernorm = map(setup.norm, norms)
        self.has_state = bool(mixer.state)
        if self.has_state:
            self.linear_attn = DeltaNet(mixer, setup)
        else:
            self.self_attn = Attention(mixer, setup)
        self.mlp: nn.Module = MoE(mlp, setup, shared) if shared else MLP(mlp, setup)

    def forward(
        self,
        residual: Tensor,
        batch: ForwardBatch,
        rope: Tensor,
        states: Iterator[Sequence[Tensor]],
        caches: Iterator[KVCache],
    ) -> Tensor:
        """Return the residual stream after this layer; takes its state or its cache."""
        if self.has_state:
            residual = self.linear_attn(residual, self.input_layernorm, batch, next(states))
        else:
            residual = self.self_attn(residual, self.input_layernorm, batch, rope, next(caches))
        return self.mlp(residual, self.post_attention_layernorm)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Layers between token ids and hidden states."""

    def __init__(self, architecture: Architecture, setup: Setup) -> None:
        super().__init__()
        (embedding,), (norm,) = (architecture.of_kind(kind) for kind in ("embedding", "norm"))
        self.embed_tokens = VocabParallelEmbedding(setup.tp, embedding.weights[0])
        shared = iter(architecture.of_kind("shared expert"))
        halves = architecture.of_kind("attention", "delta"), architecture.of_kind("mlp", "experts")
        self.layers = nn.ModuleList(
            DecoderLayer(mixer, mlp, next(shared) if mlp.kind == "experts" else None, setup)
            for mixer, mlp in zip(*halves, strict=True)
        )
        self.norm = setup.norm(norm.weights[0])

    def forward(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> Tensor:
        """Return the residual stream after the last layer; kv_caches: one per attention layer."""
        if batch.states is None:
            raise ValueError("batch.states: got None, expected the state blocks of the rows")
        residual = self.embed_tokens(batch.input_ids)
        states, caches = iter(batch.states.layers), iter(kv_caches)
        for layer in self.layers:
            residual = layer(residual, batch, rope, states, caches)
        return residual  # type: ignore[no-any-return]


class MultiTokenPrediction(nn.Module):
    """A layer of gated attention that predicts the token after the next one.

    Its input is the model's last hidden state at a token, and the embedding of the next token
    (Gloeckle et al. 2024, https://arxiv.org/abs/2404.19737; DeepSeek-V3,
    https://arxiv.org/abs/2412.19437). It keeps keys and values of its own.
    """

    def __init__(self, layers: Sequence[Layer], setup: Setup) -> None:
        super().__init__()
        inputs, mixer, mlp, *shared, last = layers
        norms = inputs.pick("pre_fc_norm_embedding", "pre_fc_norm_hidden") + list(last.weights)
        self.embedding_norm, self.hidden_norm, self.norm = map(setup.norm, norms)
        self.fc = Parameter(setup.tp, inputs.pick("fc"))
        self.layer = DecoderLayer(mixer, mlp, shared[0] if shared else None, setup)

    def forward(
        self,
        residual: Tensor,
        norm: RMSNorm,
        embedded: Tensor,
        batch: ForwardBatch,
        rope: Tensor,
        kv_cache: KVCache,
        only_keys: bool = False,
    ) -> Tensor:
        """Return the residual stream [num_tokens, hidden_size] before this layer's last norm.

        residual: before `norm`. embedded: embeddings of the next tokens. only_keys: store keys and
        values, and compute nothing else; the result is undefined.
        """
        pairs = (
            (embedded, self.embedding_norm),
            (rms_norm(residual, norm.weight, norm.eps), self.hidden_norm),
        )
        normed = [rms_norm(x, norm.weight, norm.eps) for x, norm in pairs]
        joined = linear(torch.cat(normed, 1), self.fc.weight)
        if only_keys:
            norm, attention = self.layer.input_layernorm, self.layer.self_attn
            attention.store(joined, norm, batch, rope, kv_cache)
            return joined
        return self.layer(joined, batch, rope, iter(()), iter((kv_cache,)))  # type: ignore[no-any-return]
