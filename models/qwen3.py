"""Qwen3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388), top to bottom.

A decoder of Llama's kind: RMSNorm before each half of a layer, grouped-query attention with RoPE,
SwiGLU; what is Qwen3's own is the RMSNorm of each query and key head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.attention import attend
from penstock.kernels.kv_cache import store_kv
from penstock.kernels.norm import add_rms_norm
from penstock.kernels.rope import qk_norm_rope, rope_table
from penstock.models.parallel import (
    ColumnParallelLinear,
    Replicated,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from penstock.protocol.checkpoint import ModelConfig


class Step(NamedTuple):
    """The tokens of a step, one sequence behind the other, and where their KV lies."""

    input_ids: Tensor
    """int64 [num_tokens]"""
    positions: Tensor
    """int64 [num_tokens]: index of each token in its sequence"""
    slot_mapping: Tensor
    """int64 [num_tokens]: where each token's key and value go"""
    cu_seqlens_q: Tensor
    """int32 [num_seqs + 1]: where each sequence's tokens begin"""
    max_seqlen_q: int
    """most tokens of one sequence"""
    context_lens: Tensor
    """int32 [num_seqs]: length of each sequence with this step's tokens"""
    block_tables: Tensor
    """int32 [num_seqs, max_blocks]"""


class RMSNorm(Replicated):
    """RMSNorm, of a head or, behind an addition, of the residual stream."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and x + residual; both [num_tokens, hidden_size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; each rank has its share of the heads."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        outputs = {"q_proj": size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = ColumnParallelLinear(tp, config.hidden_size, outputs)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.o_proj = RowParallelLinear(tp, size, config.hidden_size)

    def forward(self, x: Tensor, step: Step, rope: Tensor, kv_cache: Tensor) -> Tensor:
        """x [num_tokens, hidden_size]; kv_cache [2, num_blocks, block_size, heads, head_dim]."""
        k_cache, v_cache = kv_cache.unbind(0)
        q, k, v = self._heads(x)
        q, k = qk_norm_rope(
            q,
            k,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            rope=rope,
            positions=step.positions,
            eps=self.q_norm.eps,
        )
        store_kv(k, v, k_cache, v_cache, step.slot_mapping)
        out = attend(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seqlen_q,
            context_lens=step.context_lens,
            block_tables=step.block_tables,
            scale=self.scale,
        )
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, each [num_tokens, its heads of this rank, head_dim]."""
        parts = self.qkv_proj(x).split(self.qkv_proj.sizes, dim=-1)
        return [part.view(x.shape[0], -1, self.head_dim) for part in parts]


class MLP(nn.Module):
    """SwiGLU; each rank has its share of the intermediate features."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        outputs = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(tp, config.hidden_size, outputs)
        self.down_proj = RowParallelLinear(tp, config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and the residual stream around it."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, tp)

    def forward(
        self, x: Tensor, residual: Tensor, step: Step, rope: Tensor, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x: what the layer before adds to the residual stream; both [num_tokens, hidden_size]."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, step, rope, kv_cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """The layers between token ids and hidden states."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(tp, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, tp) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, step: Step, rope: Tensor, kv_cache: Tensor) -> Tensor:
        """kv_cache [num_layers, 2, …] → hidden states [num_tokens, hidden_size]."""
        x = self.embed_tokens(step.input_ids)
        residual = torch.zeros_like(x)
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            x, residual = layer(x, residual, step, rope, layer_cache)
        hidden_states, _ = self.norm(x, residual)
        return hidden_states  # type: ignore[no-any-return]


class Qwen3(nn.Module):
    """The whole model, or one rank's part of it; modules are named as in the checkpoint."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, num_positions: int) -> None:
        """num_positions: most tokens of a sequence."""
        super().__init__()
        self.model = Decoder(config, tp)
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(tp, config.vocab_size, config.hidden_size)
        self.rope = rope_table(config.head_dim, num_positions, config.rope_base)

    def forward(self, step: Step, kv_cache: Tensor) -> Tensor:
        """Hidden states of the step's tokens, [num_tokens, hidden_size].

        kv_cache [num_layers, 2, num_blocks, block_size, KV heads of this rank, head_dim].
        """
        return self.model(step, self.rope, kv_cache)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """hidden_states [num_rows, hidden_size] → on rank 0 [num_rows, vocab_size]; else None."""
        head = getattr(self, "lm_head", self.model.embed_tokens)
        return head.logits(hidden_states)
