"""Qwen3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388), top to bottom.

A decoder of Llama's kind: RMSNorm before each half of a layer, grouped-query attention with RoPE,
SwiGLU; what is Qwen3's own is the RMSNorm of each query and key head.
"""

from torch import Tensor, nn

from penstock.kernels.backends import Attention as AttentionBackend
from penstock.kernels.linear import norm_swiglu
from penstock.kernels.rope import qk_norm_rope_store, rope_table
from penstock.kernels.step import Step
from penstock.models.parallel import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from penstock.protocol.checkpoint import ModelConfig


class Attention(nn.Module):
    """Grouped-query attention; each rank has its share of the heads."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, attend: AttentionBackend) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads // tp.size
        self.num_kv_heads = config.num_key_value_heads // tp.size
        self.attend = attend
        size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        outputs = {"q_proj": size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = ColumnParallelLinear(tp, config.hidden_size, outputs)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.o_proj = RowParallelLinear(tp, size, config.hidden_size)

    def forward(
        self, residual: Tensor, norm: RMSNorm, step: Step, rope: Tensor, kv_cache: Tensor
    ) -> Tensor:
        """residual [num_tokens, hidden_size] plus the attention of its norm.

        kv_cache [2, num_blocks, block_size, KV heads, head_dim].
        """
        k_cache, v_cache = kv_cache.unbind(0)
        q = qk_norm_rope_store(
            self.qkv_proj(residual, norm),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            rope=rope,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            k_cache=k_cache,
            v_cache=v_cache,
            eps=self.q_norm.eps,
        )
        out = self.attend(q, k_cache, v_cache, step)
        return self.o_proj(out.flatten(1), residual)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU; each rank has its share of the intermediate features."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        outputs = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(tp, config.hidden_size, outputs)
        self.down_proj = RowParallelLinear(tp, config.intermediate_size, config.hidden_size)

    def forward(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """residual [num_tokens, hidden_size] plus the MLP of its norm."""
        x = norm_swiglu(residual, norm.weight, norm.eps, self.gate_up_proj.weight)
        return self.down_proj(x, residual)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and the residual stream around it."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, attend: AttentionBackend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, tp, attend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, tp)

    def forward(self, residual: Tensor, step: Step, rope: Tensor, kv_cache: Tensor) -> Tensor:
        """The residual stream behind this layer, [num_tokens, hidden_size]."""
        residual = self.self_attn(residual, self.input_layernorm, step, rope, kv_cache)
        return self.mlp(residual, self.post_attention_layernorm)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The layers between token ids and hidden states."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, attend: AttentionBackend) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(tp, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, tp, attend) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, step: Step, rope: Tensor, kv_cache: Tensor) -> Tensor:
        """kv_cache [num_layers, 2, …] → the residual stream behind the last layer."""
        residual = self.embed_tokens(step.input_ids)
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=True):
            residual = layer(residual, step, rope, layer_cache)
        return residual  # type: ignore[no-any-return]


class Qwen3(nn.Module):
    """The whole model, or one rank's part of it; modules are named as in the checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        attention: AttentionBackend,
        num_positions: int,
    ) -> None:
        """num_positions: most tokens of a sequence."""
        super().__init__()
        self.tp = tp
        self.attention = attention
        self.model = Decoder(config, tp, attention)
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(tp, config.vocab_size, config.hidden_size)
        self.rope = rope_table(config.head_dim, num_positions, config.rope_base)

    def forward(self, step: Step, kv_cache: Tensor) -> Tensor:
        """What `compute_logits` takes, for each token of the step: [num_tokens, hidden_size].

        kv_cache [num_layers, 2, num_blocks, block_size, KV heads of this rank, head_dim].
        """
        self.attention.begin(step)
        return self.model(step, self.rope, kv_cache)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[num_rows, hidden_size] → on rank 0 float32 [num_rows, vocab_size]; else None."""
        head = getattr(self, "lm_head", self.model.embed_tokens)
        return head.logits(hidden_states, self.model.norm)
