"""The hybrid demo model for training: Qwen3.5's layers and its MTP layer, in plain PyTorch.

Parameters have the names of the published checkpoints. All tokens of a batch are rows of one
matrix, in chunks of 64, so batches of different lengths run the same compiled code. Chunks of the
delta rule are computed in parallel: each is an affine map of the state, and maps are composed in a
logarithmic number of products.

The MTP layer (multi-token prediction, as in DeepSeek-V3, https://arxiv.org/abs/2412.19437, section
2.2) predicts token p + 2 from the hidden state of token p, after the last norm, and the embedding
of token p + 1. In a next pass its own output, after its norm, takes the place of the hidden state:
this pass predicts token p + 3, and so on.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 64
QK_EPS = 1e-6


class Pass(NamedTuple):
    """Result of one pass of the MTP layer."""

    hidden: Tensor  # [num_tokens, hidden_size]
    keys: Tensor  # [rows, kv_heads, length, head_dim]
    values: Tensor


class Linear(nn.Module):
    """Matrix without bias."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Norm(nn.Module):
    """RMS norm that multiplies by 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class GatedNorm(nn.Module):
    """RMS norm with weights around 1, times SiLU of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return x * functional.silu(gate.float())


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, std = (
            config[key] for key in ("hidden_size", "intermediate_size", "initializer_range")
        )
        self.gate_proj, self.up_proj = (Linear(hidden, inner, std) for _ in range(2))
        self.down_proj = Linear(inner, hidden, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Conv(nn.Module):
    """Causal depthwise convolution over the tokens of each row."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(channels, 1, taps) * 2 - 1) / math.sqrt(taps))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        weight, taps = self.weight.float(), self.weight.shape[-1]
        x = x.float()
        total = x * weight[:, 0, taps - 1]
        for back in range(1, taps):
            earlier = functional.pad(x, (0, 0, back, 0))[:-back]
            earlier = earlier * (positions >= back).unsqueeze(1)
            total = total + earlier * weight[:, 0, taps - 1 - back]
        return total


class DeltaNet(nn.Module):
    """Gated DeltaNet; the decays begin as in Mamba-2 (https://arxiv.org/abs/2405.21060)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, std = config["hidden_size"], config["initializer_range"]
        self.key_heads, self.heads = (
            config[f"linear_num_{kind}_heads"] for kind in ("key", "value")
        )
        self.key_dim, self.dim = (config[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
        keys, values = self.key_heads * self.key_dim, self.heads * self.dim
        self.sizes = [keys, keys, values]
        self.in_proj_qkv = Linear(hidden, sum(self.sizes), std)
        self.in_proj_z = Linear(hidden, values, std)
        self.in_proj_b = Linear(hidden, self.heads, std)
        self.in_proj_a = Linear(hidden, self.heads, std)
        self.conv1d = Conv(sum(self.sizes), config["linear_conv_kernel_dim"])
        step = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(self.dim, config["rms_norm_eps"])
        self.out_proj = Linear(values, hidden, std)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return what a chunk does with its state, and z.

        The map of the state, [chunks, heads, key_dim, key_dim + dim]; decayed queries, scores
        within the chunk, values and the keys that correct them.
        """
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        b, a = self.in_proj_b(x).float(), self.in_proj_a(x).float()
        with torch.autocast(x.device.type, enabled=False):
            qkv = functional.silu(self.conv1d(qkv, positions))
            q, k, v = qkv.split(self.sizes, 1)
            q, k = (_unit(_chunks(part, self.key_heads)) for part in (q, k))
            v, beta = _chunks(v, self.heads), _chunks(b.sigmoid(), self.heads)
            g = -self.A_log.float().exp() * functional.softplus(a + self.dt_bias)
            total = _chunks(g, self.heads).cumsum(2)  # [chunks, heads, 64, 1]
            return *_chunk_maps(q * self.key_dim**-0.5, k, v, beta, total), z

    def read(
        self, state: Tensor, q: Tensor, scores: Tensor, u: Tensor, w: Tensor, z: Tensor
    ) -> Tensor:
        """Return the layer's output, given the state before each chunk."""
        with torch.autocast(z.device.type, enabled=False):
            out = q @ state + scores @ (u - w @ state)
        out = out.transpose(1, 2).flatten(0, 1)  # [num_tokens, heads, dim]
        return self.out_proj(self.norm(out, z.view(out.shape)).flatten(1))


class Attention(nn.Module):
    """Grouped-query attention with a gate beside each query, and RoPE on a part of each head."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, std, eps = (
            config[key] for key in ("hidden_size", "initializer_range", "rms_norm_eps")
        )
        self.heads, self.kv_heads, self.dim = (
            config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.q_proj = Linear(hidden, 2 * self.heads * self.dim, std)
        self.k_proj, self.v_proj = (Linear(hidden, self.kv_heads * self.dim, std) for _ in range(2))
        self.o_proj = Linear(self.heads * self.dim, hidden, std)
        self.q_norm, self.k_norm = (Norm(self.dim, eps) for _ in range(2))

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, [num_tokens, heads, dim], and the gate."""
        q, gate = self.q_proj(x).view(len(x), self.heads, 2 * self.dim).chunk(2, -1)
        k, v = (part.view(len(x), -1, self.dim) for part in (self.k_proj(x), self.v_proj(x)))
        q, k = (_rotated(norm(part), rope) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        return q.to(v.dtype), k.to(v.dtype), v, gate.flatten(1)

    def read(self, out: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(out.flatten(1) * gate.sigmoid())


class Layer(nn.Module):
    """DeltaNet or attention, and MLP, each with a norm before it."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.has_state = kind == "linear_attention"
        if self.has_state:
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MLP(config)
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = (Norm(size, eps) for _ in range(2))

    def before(self, x: Tensor, of_tokens: Tensor) -> tuple[Tensor, ...]:
        """Compute what concerns tokens or chunks alone; of_tokens: positions, or RoPE."""
        mixer = self.linear_attn if self.has_state else self.self_attn
        return mixer.project(self.input_layernorm(x), of_tokens)

    def after(self, x: Tensor, *mixed: Tensor) -> Tensor:
        """Return the residual stream after the layer."""
        x = x + (self.linear_attn if self.has_state else self.self_attn).read(*mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["vocab_size"], config["hidden_size"]
        self.embed_tokens = nn.Embedding(*size)
        nn.init.normal_(self.embed_tokens.weight, std=config["initializer_range"])
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config["layer_types"])
        self.norm = Norm(size[1], config["rms_norm_eps"])


class MTP(nn.Module):
    """Layer of attention that predicts one token more."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (Norm(size, eps) for _ in range(2))
        self.fc = Linear(2 * size, size, config["initializer_range"])
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = Norm(size, eps)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Return the input of the layer."""
        norms = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        return self.fc(torch.cat(norms, -1)).float()


class Hybrid(nn.Module):
    """Qwen3.5 with its MTP layer; the output layer is the embedding."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.mtp = Decoder(config), MTP(config)
        rope = config["rope_parameters"]
        rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
        self.frequencies = rope["rope_theta"] ** (-torch.arange(0, rotated, 2).float() / rotated)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def compile_parts(self) -> None:
        """Compile what has the same shape in all batches with the same number of tokens."""
        for layer in (*self.model.layers, *self.mtp.layers):
            layer.before = torch.compile(layer.before, dynamic=False)
            layer.after = torch.compile(layer.after, dynamic=False)
        self.mtp.join = torch.compile(self.mtp.join, dynamic=False)

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states after the last norm, [num_tokens, hidden_size].

        token_ids: [rows, length]; length is a multiple of 64.
        """
        positions, rope = self._places(token_ids)
        x = self.model.embed_tokens(token_ids.flatten())
        for layer in self.model.layers:
            if layer.has_state:
                maps, *rest = layer.before(x, positions)
                x = layer.after(x, states_before(maps, len(token_ids)), *rest)
            else:
                *qkv, gate = layer.before(x, rope)
                q, k, v = (_by_row(part, len(token_ids)) for part in qkv)
                x = layer.after(x, _attend(q, k, v), gate)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def mtp_pass(self, token_ids: Tensor, hidden: Tensor, earlier: Sequence[Pass] = ()) -> Pass:
        """Apply the MTP layer: row p of its hidden states predicts token p + 2.

        hidden: of the decoder. earlier: the passes before; then row p follows from row p - 1 of the
        last of them, as if its prediction, token p + 1, were a draft.
        """
        _, rope = self._places(token_ids)
        if earlier:
            hidden = functional.pad(earlier[-1].hidden, (0, 0, 1, 0))[:-1]
        following = functional.pad(token_ids[:, 1:], (0, 1)).flatten()
        x = self.mtp.join(self.model.embed_tokens(following), hidden)
        (layer,) = self.mtp.layers
        *qkv, gate = layer.before(x, rope)
        q, k, v = (_by_row(part, len(token_ids)) for part in qkv)
        keys = torch.cat([*(made.keys for made in earlier), k], 2)
        values = torch.cat([*(made.values for made in earlier), v], 2)
        mask = mask_of_pass(len(earlier), q.shape[2], q.device) if earlier else None
        x = layer.after(x, _attend(q, keys, values, mask), gate)
        return Pass(self.mtp.norm(x), k, v)

    def _places(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of all tokens, and cosines and sines [num_tokens, 1, rotated]."""
        rows, length = token_ids.shape
        positions = torch.arange(length, device=token_ids.device)
        angles = positions.unsqueeze(1) * self.frequencies.to(positions.device)
        rope = torch.cat([angles.cos(), angles.sin()], -1)
        return positions.repeat(rows), rope.repeat(rows, 1).unsqueeze(1)


def mask_of_pass(number: int, length: int, device: torch.device) -> Tensor:
    """Return which keys of all passes up to `number` a row sees, [length, (number + 1) * length].

    Row p has `number` drafts before it. Each pass has made the keys of one of them.
    """
    place = torch.arange(length, device=device)
    begin = place.unsqueeze(1) - number
    seen = [place <= begin]
    seen += [place == begin + index for index in range(1, number + 1)]
    return torch.cat(seen, 1)


def states_before(maps: Tensor, rows: int) -> Tensor:
    """Return the state before each chunk, [chunks, heads, key_dim, dim].

    maps: [chunks, heads, key_dim, key_dim + dim], of which the first key_dim columns multiply the
    state, and the others are added to it.
    """
    key_dim = maps.shape[2]
    maps = maps.unflatten(0, (rows, -1))
    length, distance = maps.shape[1], 1
    with torch.autocast(maps.device.type, enabled=False):
        while distance < length:
            later, earlier = maps[:, distance:], maps[:, :-distance]
            factor, added = later.split([key_dim, maps.shape[-1] - key_dim], -1)
            joined = factor @ earlier + functional.pad(added, (key_dim, 0))
            maps = torch.cat([maps[:, :distance], joined], 1)
            distance *= 2
    return functional.pad(maps[:, :-1, ..., key_dim:], (0, 0, 0, 0, 0, 0, 1, 0)).flatten(0, 1)


def _chunk_maps(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """Return the parts that `DeltaNet.project` describes; the WY form of arXiv:2406.06484.

    q, k: [chunks, key_heads, 64, key_dim]. v: [chunks, heads, 64, dim]. total: sums of g.
    """
    group = v.shape[1] // k.shape[1]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).triu(1)
    decay = (total - total.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
    keys = k.transpose(2, 3)
    overlap, scores = ((part @ keys).repeat_interleave(group, 1) * decay for part in (k, q))
    q, k = (part.repeat_interleave(group, 1) for part in (q, k))
    inverse = _inverse((beta * overlap).tril(-1))
    grown, left = total.exp(), (total[:, :, -1:] - total).exp()
    u, w = inverse @ (beta * v), inverse @ (beta * grown * k)
    kept = (left * k).transpose(2, 3)
    factor = grown[:, :, -1:] * torch.eye(k.shape[-1], device=k.device) - kept @ w
    return torch.cat([factor, kept @ u], -1), grown * q, scores, u, w


def _inverse(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + lower, strictly lower triangular [..., 64, 64].

    The inverse is found in blocks of 1, 2, 4 … 32. A step of Newton's method gives it the gradient.
    """
    size = lower.shape[-1]
    place = torch.arange(size, device=lower.device)
    with torch.no_grad():
        inverse = torch.eye(size, device=lower.device).expand(lower.shape)
        block = 1
        while block < size:
            number = place // block
            is_below = (number.unsqueeze(1) % 2 == 1) & (number.unsqueeze(1) - 1 == number)
            inverse = inverse - inverse @ (lower * is_below) @ inverse
            block *= 2
    return 2 * inverse - inverse @ (inverse + lower @ inverse)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return [num_tokens, heads, dim]; q: [rows, heads, length, dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(0, 1)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """Return [rows, heads, length, dim] of [num_tokens, heads, dim]."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def _chunks(x: Tensor, heads: int) -> Tensor:
    """Return [chunks, heads, 64, dim] of [num_tokens, heads * dim]."""
    return x.view(-1, CHUNK, heads, x.shape[1] // heads).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + QK_EPS)


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the first features of each head, the first half of these with the second."""
    cos, sin = rope.chunk(2, -1)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
