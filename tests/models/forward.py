"""Penstock's model of a checkpoint, and its logits after whole prompts."""

import contextlib
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.attention.backends import TorchAttention
from penstock.kernels.cpu.llvm_decoder import KEYS
from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.states import States, StateStep, pack_states
from penstock.models.architecture import Ranks, describe
from penstock.models.compiled import CompiledDecoder
from penstock.models.layers import Setup
from penstock.models.model import Model
from penstock.models.parallel import with_integers
from penstock.models.tensor_parallel import TensorParallel
from penstock.models.weights import load_weights, with_own_head
from penstock.protocol.checkpoint import read_model_config
from tests.kernels.state_tensors import state_tensors


def load_model(
    folder: Path,
    tp: TensorParallel | None = None,
    expert_parallel: bool = False,
    quantization: str = "none",
    quantize_lm_head: bool = False,
    is_compiled: bool = True,
    keeps_integers: bool = False,
    speculative_method: str = "none",
) -> Model:
    """Return the model of a checkpoint, or one rank's part.

    is_compiled: with compiled layers, as on a CPU by default, if the model can have them.
    keeps_integers: as on a CPU by default.
    """
    config = with_own_head(read_model_config(folder, quantization, speculative_method), folder)
    attention = TorchAttention(16, config.head_dim**-0.5)
    num_positions = config.rope.num_positions
    setup = Setup(config, tp or TensorParallel(), attention, expert_parallel)
    with with_integers() if keeps_integers else contextlib.nullcontext():
        model = Model(setup, num_positions, quantize_lm_head)
    model.config = config
    load_weights(model, folder, lambda: None, config.weight_format)
    if is_compiled and not config.fp8 and config.head_dim % KEYS == 0:
        model.compiled = CompiledDecoder(model, config)
    return model


@torch.inference_mode()
def prefill_logits(model: Model, prompts: list[list[int]], block_size: int = 16) -> Tensor | None:
    """Return the logits after every token of prompts, in one step; None except on rank 0."""
    step, kv_caches = prefill_step(model, prompts, block_size)
    return model.head.join(model.compute_logits(model(step, kv_caches)))


@torch.inference_mode()
def mtp_logits(model: Model, prompts: list[list[int]]) -> Tensor | None:
    """Return the logits of multi-token prediction for all tokens of prompts but the last."""
    shorter = [prompt[:-1] for prompt in prompts]
    next_ids = torch.tensor([token for prompt in prompts for token in prompt[1:]])
    step, kv_caches = prefill_step(model, shorter, 16)
    hidden_states = model(step, kv_caches)
    predicted = model.predict(hidden_states, model.model.norm, next_ids, step, kv_caches)
    return model.head.join(model.compute_logits(predicted, norm=model.mtp.norm))


def prefill_step(
    model: Model, prompts: list[list[int]], block_size: int
) -> tuple[ForwardBatch, list[KVCache]]:
    """Return a step of whole prompts, and the empty cache of each layer with attention."""
    attentions = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    attention = attentions[0]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    max_blocks = -(-int(lengths.max()) // block_size)
    tables = torch.randperm(len(prompts) * max_blocks).view(len(prompts), -1)
    num_layers = len(attentions) + (model.mtp is not None)
    shape = (num_layers, 2, tables.numel(), block_size, attention.num_kv_heads)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(prompts)).repeat_interleave(lengths)
    longest = int(lengths.max())
    step = ForwardBatch(
        BatchShape(len(prompts), len(rows), 0, len(prompts), longest, longest, longest),
        input_ids=torch.tensor([token for prompt in prompts for token in prompt]),
        positions=positions,
        slot_mapping=tables[rows, positions // block_size] * block_size + positions % block_size,
        cu_seqlens_q=torch.tensor([0, *lengths.cumsum(0)]).int(),
        cu_seqlens_k=torch.tensor([0, *lengths.cumsum(0)]).int(),
        context_lens=lengths.int(),
        decode_lens=torch.empty(0),
        tiles=torch.empty(0),
        block_tables=tables.int(),
        states=_fresh_states(model, lengths),
    )
    kv_cache = torch.zeros(*shape, attention.q_norm.weight.shape[0])
    return step, [KVCache(*layer) for layer in kv_cache]


def _fresh_states(model: Model, lengths: Tensor) -> StateStep | None:
    """Return state blocks for a step of whole prompts; None without recurrent state."""
    if not any(hasattr(layer, "linear_attn") for layer in model.model.layers):
        return None
    states = allocate_states(model, len(lengths))
    rows = torch.arange(len(lengths), dtype=torch.int32)
    packed = pack_states(torch.full_like(rows, -1), rows)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return states.begin(packed, bounds, lengths, lengths)


def allocate_states(model: Model, num_blocks: int) -> States:
    """Return state blocks of a rank, filled with NaN."""
    layers = describe(model.config).state_layers
    ranks = Ranks(model.tp.size, model.tp.rank)
    return States(
        torch.zeros(num_blocks + 1, 2, dtype=torch.int32),
        [
            state_tensors(num_blocks + 1, (state.shape_of_rank(ranks) for state in layer.state))
            for layer in layers
        ],
    )


def random_prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    """Prompts of random tokens, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
