"""Layers of decoders: attention, SwiGLU, a mixture of experts, the table of RoPE.

Each layer is applied to the norm of the residual stream and adds its output to the residual stream.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.kernels.attention.backends import AttentionBackend
from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.elementwise import add_gated, sigmoid_and_mul
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear.linear import linear, norm_swiglu
from penstock.kernels.moe import norm_moe
from penstock.models import architecture
from penstock.models.architecture import Weight
from penstock.models.parallel import (
    ColumnParallelLinear,
    Experts,
    Parameter,
    RMSNorm,
    RowParallelLinear,
)
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.checkpoint import ModelConfig, Yarn
from penstock.protocol.quantization import WeightFormat


class Setup(NamedTuple):
    """Arguments that all layers of a rank's model share."""

    config: ModelConfig
    tp: TensorParallel
    attend: AttentionBackend
    expert_parallel: bool = False  # a rank has whole experts instead of parts of all

    def norm(self, weight: Weight) -> RMSNorm:
        return RMSNorm(self.tp, weight, self.config.rms_norm_eps)


class Attention(nn.Module):
    """Grouped-query attention, with or without gates; each rank has a share of the heads."""

    def __init__(self, layer: architecture.Layer, setup: Setup) -> None:
        super().__init__()
        config, tp, self.attend, _ = setup
        qkv, out = layer.pick("q_proj", "k_proj", "v_proj"), layer.pick("o_proj")
        self.q_norm, self.k_norm = map(setup.norm, layer.pick("q_norm", "k_norm"))
        self.gated = qkv[0].shape[0] == 2 * out[0].shape[1]  # a gate follows each query head
        self.qkv_proj = ColumnParallelLinear(tp, qkv, format_of(config, qkv))
        self.num_heads, self.num_kv_heads, _ = (
            weight.axes[0].units_of_rank(self.qkv_proj.ranks) for weight in qkv
        )
        self.o_proj = RowParallelLinear(tp, out, format_of(config, out))

    def forward(
        self, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, rope: Tensor, kv_cache: KVCache
    ) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the attention output for its norm."""
        q, qkv = self.store(residual, norm, batch, rope, kv_cache)
        out = self.attend(q, kv_cache, batch)
        if self.gated:
            by_head = qkv[:, : 2 * out[0].numel()].view(len(out), self.num_heads, 2, -1)
            out = sigmoid_and_mul(by_head[:, :, 1], out)
        return self.o_proj(out.flatten(1), residual)  # type: ignore[no-any-return]

    def store(
        self, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, rope: Tensor, kv_cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values. Return the queries, and the joined projections with the gates."""
        qkv = self.qkv_proj(residual, norm)
        q = qk_norm_rope_store(
            qkv,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            rope=rope,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            kv_cache=kv_cache,
            eps=self.q_norm.eps,
            gated=self.gated,
        )
        return q, qkv


class MLP(nn.Module):
    """SwiGLU layer; each rank has a share of the intermediate features."""

    def __init__(self, layer: architecture.Layer, setup: Setup) -> None:
        super().__init__()
        config, tp, *_ = setup
        gate_up, down = layer.pick("gate_proj", "up_proj"), layer.pick("down_proj")
        self.gate_up_proj = ColumnParallelLinear(tp, gate_up, format_of(config, gate_up))
        self.down_proj = RowParallelLinear(tp, down, format_of(config, down))

    def forward(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the MLP's output for its norm."""
        x = norm_swiglu(residual, norm.weight, norm.eps, self.gate_up_proj.weight)
        return self.down_proj(x, residual)  # type: ignore[no-any-return]


class MoE(nn.Module):
    """Mixture of experts: a router chooses the experts of each token.

    The ranks of a group divide either every expert's inner features (tensor parallelism) or the
    experts (expert parallelism). Each rank routes all tokens and adds the outputs of its share. The
    sums are reduced as after any other layer.
    """

    def __init__(
        self, layer: architecture.Layer, setup: Setup, shared: architecture.Layer | None = None
    ) -> None:
        """Make the layers.

        shared: an expert of all tokens, which is one more expert if it has the others' form.
        """
        super().__init__()
        config, tp, _, expert_parallel = setup
        self.tp = tp
        self.top_k = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        gate_up, down = layer.pick("gate_proj", "up_proj"), layer.pick("down_proj")
        _, weight_format = form = _form_of(config, layer)
        joins = shared is not None and not expert_parallel and _form_of(config, shared) == form
        self.shared = SharedExpert(shared, setup) if shared and not joins else None
        self.has_shared = joins  # as the last expert

        def pick(*modules: str) -> list[Weight]:
            return shared.pick(*modules) if shared and joins else []

        self.gate = Parameter(tp, [*layer.pick("gate"), *pick("shared_expert_gate")])
        experts = weight_format, expert_parallel
        self.gate_up_proj = Experts(tp, gate_up, *experts, pick("gate_proj", "up_proj"))
        self.down_proj = Experts(tp, down, *experts, pick("down_proj"))
        self.first = down[0].experts_of_rank(self.down_proj.ranks).start

    def forward(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the experts' output for its norm."""
        num_tokens, hidden_size = residual.shape
        part = norm_moe(
            residual,
            norm.weight,
            norm.eps,
            self.gate.weight,
            self.gate_up_proj.weight,
            self.down_proj.weight,
            top_k=self.top_k,
            normalize=self.normalize,
            first_expert=self.first,
            shared=self.has_shared,
            add=self.tp.size == 1,
            out=self.tp.empty(num_tokens, hidden_size, residual.dtype),
        )
        if self.shared:
            self.shared(residual, norm, part)
        return part if self.tp.size == 1 else self.tp.all_reduce(part, residual)

    @property
    def num_idle_weights(self) -> int:
        """Average number of this rank's weights that are not used for a token."""
        weights = self.gate_up_proj.weight, self.down_proj.weight
        num_weights = sum(weight.shape.numel() for weight in weights)
        return num_weights - num_weights * (self.top_k + self.has_shared) // len(self.gate.weight)


class SharedExpert(nn.Module):
    """SwiGLU of all tokens, whose output has the sigmoid of a product as a factor."""

    def __init__(self, layer: architecture.Layer, setup: Setup) -> None:
        super().__init__()
        self.mlp = MLP(layer, setup)
        self.gate = Parameter(setup.tp, layer.pick("shared_expert_gate"))

    def forward(self, residual: Tensor, norm: RMSNorm, part: Tensor) -> None:
        """Add this rank's part of the output for the norm of residual to `part`."""
        gate_up, down = self.mlp.gate_up_proj.weight, self.mlp.down_proj.weight
        out = linear(norm_swiglu(residual, norm.weight, norm.eps, gate_up), down)
        add_gated(part, out, residual, norm.weight, norm.eps, self.gate.weight)


def _form_of(config: ModelConfig, layer: architecture.Layer) -> tuple[object, WeightFormat | None]:
    """Return the shapes and the common format of an expert's matrices."""
    weights = layer.pick("gate_proj", "up_proj", "down_proj")
    return [weight.shape for weight in weights], format_of(config, weights)


def format_of(config: ModelConfig, weights: list[Weight]) -> WeightFormat | None:
    """Return the common format of joined weights; None: 16 bits."""
    names = (next(weight.names()).removesuffix(".weight") for weight in weights)
    return config.weight_format and config.weight_format.of(names)


def rope_table(head_dim: int, num_positions: int, base: float, yarn: Yarn | None = None) -> Tensor:
    """Return cosines, then sines, of every position: float32 [num_positions, head_dim].

    RoPE: Su et al. 2021, https://arxiv.org/abs/2104.09864. YaRN: Peng et al. 2023,
    https://arxiv.org/abs/2309.00071.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, expected an even number; RoPE rotates pairs")
    wavelengths = base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / wavelengths
    if yarn is not None:
        kept = _kept_share(head_dim, base, yarn)
        frequencies = frequencies * kept + 1.0 / (yarn.factor * wavelengths) * (1 - kept)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return table if yarn is None else table * yarn.attention_factor


def _kept_share(head_dim: int, base: float, yarn: Yarn) -> Tensor:
    """Return the share of each frequency that YaRN keeps: 1 if high, then a ramp down to 0."""

    def feature(turns: float) -> float:
        """Return the feature with this number of turns in the original positions."""
        wavelength = yarn.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(base))

    first, last = feature(yarn.beta_fast), feature(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
