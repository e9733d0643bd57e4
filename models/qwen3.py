"""Qwen3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388).

A decoder like Llama's: RMSNorm before each half of a layer, grouped-query attention with RoPE, and
SwiGLU, or in Qwen3-MoE a mixture of SwiGLU experts. Qwen3 adds an RMSNorm of each query and key
head.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.kernels.attention.backends import AttentionBackend
from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.step import Slots, StepBuffers
from penstock.kernels.linear.linear import norm_swiglu
from penstock.models.moe import MoE
from penstock.models.parallel import (
    ColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from penstock.models.rope_table import rope_table
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.checkpoint import ModelConfig


class Attention(nn.Module):
    """Grouped-query attention; each rank has a share of the heads."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, attend: AttentionBackend, name: str
    ) -> None:
        """Make the layers; name: in the checkpoint."""
        super().__init__()
        self.num_heads = config.num_attention_heads // tp.size
        num_parts = min(tp.size, config.num_key_value_heads)
        self.num_kv_heads = config.num_key_value_heads // num_parts
        self.attend = attend
        size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        outputs = {"q_proj": size, "k_proj": kv_size, "v_proj": kv_size}
        shared = {"k_proj": num_parts, "v_proj": num_parts}
        qkv_format = config.format_of(name, *outputs)
        self.qkv_proj = ColumnParallelLinear(tp, config.hidden_size, outputs, shared, qkv_format)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        o_format = config.format_of(name, "o_proj")
        self.o_proj = RowParallelLinear(tp, size, config.hidden_size, o_format)

    def forward(
        self, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, rope: Tensor, kv_cache: KVCache
    ) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the attention of its norm."""
        q = qk_norm_rope_store(
            self.qkv_proj(residual, norm),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            rope=rope,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            kv_cache=kv_cache,
            eps=self.q_norm.eps,
        )
        out = self.attend(q, kv_cache, batch)
        return self.o_proj(out.flatten(1), residual)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU; each rank has a share of the intermediate features."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, name: str) -> None:
        """Make the layers; name: in the checkpoint."""
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        outputs = {"gate_proj": inner, "up_proj": inner}
        gate_up_format = config.format_of(name, *outputs)
        self.gate_up_proj = ColumnParallelLinear(tp, hidden, outputs, None, gate_up_format)
        down_format = config.format_of(name, "down_proj")
        self.down_proj = RowParallelLinear(tp, inner, hidden, down_format)

    def forward(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the MLP of its norm."""
        x = norm_swiglu(residual, norm.weight, norm.eps, self.gate_up_proj.weight)
        return self.down_proj(x, residual)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and the residual stream around it."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        attend: AttentionBackend,
        expert_parallel: bool,
        index: int,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        name = f"model.layers.{index}"
        self.self_attn = Attention(config, tp, attend, f"{name}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        mlp = f"{name}.mlp"
        is_sparse = config.is_sparse(index)
        self.mlp = MoE(config, tp, expert_parallel, mlp) if is_sparse else MLP(config, tp, mlp)

    def forward(
        self, residual: Tensor, batch: ForwardBatch, rope: Tensor, kv_cache: KVCache
    ) -> Tensor:
        """Return the residual stream after this layer, [num_tokens, hidden_size]."""
        residual = self.self_attn(residual, self.input_layernorm, batch, rope, kv_cache)
        return self.mlp(residual, self.post_attention_layernorm)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The layers between token ids and hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        attend: AttentionBackend,
        expert_parallel: bool,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(tp, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, tp, attend, expert_parallel, index)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> Tensor:
        """Return the residual stream after the last layer; kv_caches: of each layer."""
        residual = self.embed_tokens(batch.input_ids)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            residual = layer(residual, batch, rope, kv_cache)
        return residual  # type: ignore[no-any-return]


# (record, number of rows) → the rows' tokens, -1 for a failed row, without logits processing
HostStep = Callable[[NDArray[np.int32], int], list[int]]


class Compiled(Protocol):
    """A faster replacement of the layers, and of the output layer unless that is `Quantized`."""

    def forward(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> Tensor:
        """Compute `Decoder.forward`."""

    def logits(
        self, hidden_states: Tensor, norm: RMSNorm, weight: Tensor, out: Tensor | None
    ) -> Tensor:
        """Compute `ParallelLMHead.logits`."""

    def decode_step(
        self, slots: Slots, buffers: StepBuffers, kv_caches: Sequence[KVCache]
    ) -> HostStep | None:
        """Return the function of steps that only decode, or None if there is none."""


class Qwen3(nn.Module):
    """The model, or one rank's part; modules have the names of the checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        attention: AttentionBackend,
        num_positions: int,
        expert_parallel: bool = False,
        quantize_lm_head: bool = False,
    ) -> None:
        """Build the layers.

        num_positions: maximum tokens of a sequence. expert_parallel: see `MoE`. quantize_lm_head:
        output layer in 8 bits, a copy of the embedding if the checkpoint ties the two.
        """
        super().__init__()
        self.tp = tp
        self.attention = attention
        self.compiled: Compiled | None = None
        # False: hidden states are the result, and no logits are computed
        self.has_head = not config.is_embedding_model
        self.model = Decoder(config, tp, attention, expert_parallel)
        if (quantize_lm_head and self.has_head) or not config.tie_word_embeddings:
            source = "model.embed_tokens" if config.tie_word_embeddings else None
            sizes = config.vocab_size, config.hidden_size
            self.lm_head = ParallelLMHead(tp, *sizes, quantize_lm_head, source)
        rope = config.rope
        self.rope = rope_table(config.head_dim, num_positions, rope.base, rope.yarn)

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[KVCache]) -> Tensor:
        """Return the input of `compute_logits` for each token: [num_tokens, hidden_size].

        kv_caches: of each layer, with the KV heads of this rank.
        """
        if self.compiled:
            return self.compiled.forward(batch, self.rope, kv_caches)
        self.attention.begin(batch)
        return self.model(batch, self.rope, kv_caches)  # type: ignore[no-any-return]

    @property
    def head(self) -> ParallelLMHead:
        return getattr(self, "lm_head", self.model.embed_tokens)

    def compute_logits(self, hidden_states: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's share of the logits, float32: see `ParallelLMHead.logits`."""
        weight = self.head.weight
        if self.compiled and isinstance(weight, Tensor):
            return self.compiled.logits(hidden_states, self.model.norm, weight, out)
        return self.head.logits(hidden_states, self.model.norm, out)
