"""Qwen3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388).

Qwen3 is a decoder like Llama's, with an RMSNorm before each half of a layer and grouped-query
attention with RoPE. The second half is SwiGLU, or in Qwen3-MoE a mixture of SwiGLU experts. Qwen3
adds an RMSNorm for each query and key head.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.models.architecture import Architecture, Layer
from penstock.models.layers import MLP, Attention, MoE, Setup
from penstock.models.parallel import VocabParallelEmbedding


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a preceding norm and the residual stream around it."""

    def __init__(self, attention: Layer, mlp: Layer, setup: Setup) -> None:
        super().__init__()
        norms = *attention.pick("input_layernorm"), *mlp.pick("post_attention_layernorm")
        self.input_layernorm, self.post_attention_layernorm = map(setup.norm, norms)
        self.self_attn = Attention(attention, setup)
        self.mlp: nn.Module = MoE(mlp, setup) if mlp.kind == "experts" else MLP(mlp, setup)

    def forward(
        self, residual: Tensor, batch: ForwardBatch, rope: Tensor, kv_cache: KVCache
    ) -> Tensor:
        """Return the residual stream after this layer, [num_tokens, hidden_size]."""
        residual = self.self_attn(residual, self.input_layernorm, batch, rope, kv_cache)
        return self.mlp(residual, self.post_attention_layernorm)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Layers between token ids and hidden states."""

    def __init__(self, architecture: Architecture, setup: Setup) -> None:
        super().__init__()
        (embedding,), (norm,) = (architecture.of_kind(kind) for kind in ("embedding", "norm"))
        self.embed_tokens = VocabParallelEmbedding(setup.tp, embedding.weights[0])
        halves = architecture.of_kind("attention"), architecture.of_kind("mlp", "experts")
        self.layers = nn.ModuleList(
            DecoderLayer(*pair, setup) for pair in zip(*halves, strict=True)
        )
        self.norm = setup.norm(norm.weights[0])

    def forward(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> Tensor:
        """Return the residual stream after the last layer; kv_caches: one per attention layer."""
        residual = self.embed_tokens(batch.input_ids)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            residual = layer(residual, batch, rope, kv_cache)
        return residual  # type: ignore[no-any-return]
