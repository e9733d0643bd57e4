"""The toy families computed plainly: the whole sequence at once, from the checkpoint's tensors."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from penstock.models.layers import rope_table
from tests.models.toy.family import SHAPE

HEADS, KV_HEADS, HEAD_DIM = (
    SHAPE[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def attend(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    def heads(kind: str, number: int) -> Tensor:
        return (x @ weights[f"{name}.{kind}_proj.weight"].T).view(-1, number, HEAD_DIM)

    cos, sin = rope_table(HEAD_DIM, len(x), SHAPE["rope_theta"])[:, None].chunk(2, -1)

    def rotated(kind: str, number: int) -> Tensor:
        normed = norm(heads(kind, number), weights[f"{name}.{kind}_norm.weight"])
        first, second = normed.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    q, k, v = rotated("q", HEADS), rotated("k", KV_HEADS), heads("v", KV_HEADS)
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).flatten(1) @ weights[f"{name}.o_proj.weight"].T


def recur(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    inputs = x @ weights[f"{name}.x_proj.weight"].T
    gates = (x @ weights[f"{name}.g_proj.weight"].T).sigmoid()
    states = [torch.zeros_like(inputs[0])]
    for gate, added in zip(gates, inputs, strict=True):
        states.append(gate * states[-1] + added)
    return torch.stack(states[1:]) @ weights[f"{name}.out_proj.weight"].T


def swiglu(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    gate, up, down = (weights[f"{name}.{kind}_proj.weight"].T for kind in ("gate", "up", "down"))
    return (silu(x @ gate) * (x @ up)) @ down


def generate(folder: Path, prompt: list[int], num_out: int) -> list[int]:
    """Return the likeliest tokens, computing everything again for each."""
    weights = load_file(folder / "model.safetensors")
    token_ids = list(prompt)
    for _ in range(num_out):
        x = weights["model.embed_tokens.weight"][token_ids]
        for index in range(SHAPE["num_hidden_layers"]):
            name = f"model.layers.{index}"
            normed = norm(x, weights[f"{name}.input_layernorm.weight"])
            if f"{name}.mlp.up_proj.weight" in weights:
                x = x + swiglu(normed, weights, f"{name}.mlp")
                x = x + attend(normed, weights, f"{name}.attn")
                continue
            mix, module = (attend, "attn") if index % 2 else (recur, "recurrent")
            x = x + mix(normed, weights, f"{name}.{module}")
        logits = norm(x[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]
