"""The toy families: attention and a gated recurrence in turns, or attention beside SwiGLU.

The recurrence is `s = g * s + x` for each feature, with a gate and an input computed from each
token: the order of tokens matters, so a token lost, doubled or exchanged shows. It follows the
contract of `penstock.kernels.layouts.states`, as a family with kernels must.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear.linear import norm_swiglu
from penstock.models.architecture import Architecture, Layer
from penstock.models.layers import MLP, Attention, Setup
from penstock.models.parallel import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config
from tests.models.toy.family import SHAPE, describe


class Recurrent(nn.Module):
    """The gated recurrence; each rank has a share of the features."""

    def __init__(self, layer: Layer, tp: TensorParallel) -> None:
        super().__init__()
        self.xg_proj = ColumnParallelLinear(tp, layer.pick("x_proj", "g_proj"), None)
        self.out_proj = RowParallelLinear(tp, layer.pick("out_proj"), None)

    def forward(
        self, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, state: Sequence[Tensor]
    ) -> Tensor:
        x, g = self.xg_proj(residual, norm).float().chunk(2, dim=-1)
        out = recur(x, g.sigmoid(), batch, *state)
        return self.out_proj(out.to(residual.dtype), residual)  # type: ignore[no-any-return]


def recur(x: Tensor, g: Tensor, batch: ForwardBatch, state: Tensor, window: Tensor) -> Tensor:
    """Apply the recurrence to the rows of a step. Return the states after each token."""
    step = batch.states
    assert step
    out = torch.empty_like(x)
    bounds, num_decode = batch.cu_seqlens_q.tolist(), int(batch.decode_lens.count_nonzero())
    before, s, place = -1, x[0], 0
    rows = zip(step.read.tolist(), step.written.tolist(), step.window.tolist(), strict=True)
    for row, (read, written, num_before) in enumerate(rows):
        decodes = row < num_decode
        if written < 0 or written != before:  # not a further row of the same draft
            s = torch.zeros_like(x[0]) if read < 0 else state[read].clone()
            for token in range(num_before):
                s = window[read, :, token, 1] * s + window[read, :, token, 0]
            if decodes and written >= 0:
                state[written] = s
            before, place = written, 0
        for token in range(bounds[row], bounds[row + 1]):
            s = out[token] = g[token] * s + x[token]
            if decodes and written >= 0:
                window[written, :, place] = torch.stack([x[token], g[token]], 1)
                place += 1
        if not decodes and written >= 0:
            state[written] = s
    return out


class Decoder(nn.Module):
    """Layers between token ids and hidden states, as in `penstock.models.qwen3`."""

    def __init__(self, description: Architecture, setup: Setup) -> None:
        super().__init__()
        (embedding,), (norm,) = (description.of_kind(kind) for kind in ("embedding", "norm"))
        self.embed_tokens = VocabParallelEmbedding(setup.tp, embedding.weights[0])
        self.layers = nn.ModuleList()
        for layer in description.of_kind("attention", "recurrent"):
            block = nn.Module()
            block.input_layernorm = setup.norm(layer.weights[0])
            if layer.state:
                block.recurrent = Recurrent(layer, setup.tp)
            else:
                block.attn = Attention(layer, setup)
            self.layers.append(block)
        for block, layer in zip(self.layers, description.of_kind("mlp"), strict=False):
            block.mlp = MLP(layer, setup)
        self.norm = setup.norm(norm.weights[0])

    def forward(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> Tensor:
        residual = self.embed_tokens(batch.input_ids)
        states, caches = iter(batch.states.layers if batch.states else ()), iter(kv_caches)
        for block in self.layers:
            norm = block.input_layernorm
            if hasattr(block, "recurrent"):
                residual = block.recurrent(residual, norm, batch, next(states))
            elif hasattr(block, "mlp"):
                inner = norm_swiglu(residual, norm.weight, norm.eps, block.mlp.gate_up_proj.weight)
                residual = block.attn(residual, norm, batch, rope, next(caches))
                residual = block.mlp.down_proj(inner, residual)
            else:
                residual = block.attn(residual, norm, batch, rope, next(caches))
        return residual  # type: ignore[no-any-return]


def save_checkpoint(folder: Path, **shape: Any) -> Path:
    """Write a random checkpoint of `SHAPE`, changed by `shape`, with the demo model's tokenizer.

    The families must be `registered`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | {"eos_token_id": 0} | shape))
    shutil.copy(Config().model_folder / "tokenizer.json", folder)
    noise = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.rand(shape, generator=noise) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=noise) * 0.2
        for name, shape, _ in describe(read_model_config(folder)).tensors()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
