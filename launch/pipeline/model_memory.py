"""Arithmetic of the memory that a model needs. It reads no file and knows no device.

Weights and KV cache are exact; what a step takes in addition is an estimate from above.
"""

from typing import NamedTuple

from penstock.protocol.checkpoint import ModelConfig

RUN = 4096
"""token ids between which the vocabulary is cut on GPUs"""
FP8_BLOCK = 128
SCALE_BYTES = 4
GPU_CONTEXT_BYTES = 700 << 20
"""of the driver, and of compiled kernels, in each worker"""


class Layout(NamedTuple):
    """Choices that change how much memory a worker needs."""

    tp: int = 1
    on_gpus: bool = True
    expert_parallel: bool = False
    quantize_lm_head: bool = False
    fp8_kv_cache: bool = False

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a number that is not quantized."""
        return 2 if self.on_gpus else 4


class Needs(NamedTuple):
    """Memory of each worker, bytes."""

    weights: int
    kv_per_token: int
    step: int
    """of the largest step, in addition"""

    def with_context(self, num_tokens: int) -> int:
        """Return all of it with a KV cache of `num_tokens`."""
        return self.weights + self.step + self.kv_per_token * num_tokens

    def num_tokens(self, num_bytes: float) -> int:
        """Return the tokens whose keys and values fit into the rest of `num_bytes`; 0: none."""
        return max(0, int((num_bytes - self.weights - self.step) // self.kv_per_token))


def needs(
    model: ModelConfig,
    layout: Layout,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
) -> Needs:
    """Return what a worker of rank 0 needs."""
    num_kv_heads = max(1, model.num_key_value_heads // layout.tp)
    scale_bytes = SCALE_BYTES if layout.fp8_kv_cache else 0
    head_bytes = model.head_dim * (1 if layout.fp8_kv_cache else layout.element_bytes) + scale_bytes
    return Needs(
        weights=weight_bytes(model, layout),
        kv_per_token=2 * model.num_hidden_layers * num_kv_heads * head_bytes,
        step=_step_bytes(model, layout, max_num_seqs, max_num_batched_tokens),
    )


def weight_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of a rank's parameters."""
    hidden, size = model.hidden_size, layout.element_bytes
    vocabulary = _vocabulary(model, layout) * hidden
    total = vocabulary * size + hidden * size  # with the last norm
    if layout.quantize_lm_head:
        total += vocabulary + _vocabulary(model, layout) * SCALE_BYTES
    elif not model.tie_word_embeddings:
        total += vocabulary * size
    dense = _attention(model, layout) + (2 * hidden + 2 * model.head_dim) * size
    for layer in range(model.num_hidden_layers):
        total += dense + (_experts if model.is_sparse(layer) else _mlp)(model, layout)
    return total


def _vocabulary(model: ModelConfig, layout: Layout) -> int:
    run = RUN if layout.on_gpus and layout.tp > 1 else 1
    return -(-model.vocab_size // (run * layout.tp)) * run


def _attention(model: ModelConfig, layout: Layout) -> int:
    heads = model.num_attention_heads // layout.tp * model.head_dim
    kv = max(1, model.num_key_value_heads // layout.tp) * model.head_dim
    qkv = _matrix(model, layout, [heads, kv, kv], model.hidden_size, cut=[heads, kv])
    cut = [heads] if layout.tp > 1 else []
    return qkv + _matrix(model, layout, [model.hidden_size], heads, cut)


def _mlp(model: ModelConfig, layout: Layout) -> int:
    inner = model.intermediate_size // layout.tp
    gate_up = _matrix(model, layout, [inner, inner], model.hidden_size, cut=[inner])
    cut = [inner] if layout.tp > 1 else []
    return gate_up + _matrix(model, layout, [model.hidden_size], inner, cut)


def _experts(model: ModelConfig, layout: Layout) -> int:
    cut_by = 1 if layout.expert_parallel else layout.tp
    inner, hidden = model.moe_intermediate_size // cut_by, model.hidden_size
    number = model.expert_count // (layout.tp // cut_by)
    gate_up = _matrix(model, layout, [inner, inner], hidden, cut=[inner])
    down = _matrix(model, layout, [hidden], inner, cut=[inner] if cut_by > 1 else [])
    return number * (gate_up + down) + model.expert_count * hidden * layout.element_bytes


def _matrix(
    model: ModelConfig, layout: Layout, rows: list[int], columns: int, cut: list[int]
) -> int:
    """Return the bytes of adjacent weights; cut: sizes that must be whole blocks to keep scales."""
    num_rows = sum(rows)
    if not model.fp8:
        return num_rows * columns * layout.element_bytes
    if model.fp8 == "rows" or any(size % FP8_BLOCK for size in cut):
        return num_rows * columns + num_rows * SCALE_BYTES
    blocks = -(-num_rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    return num_rows * columns + blocks * SCALE_BYTES


def _step_bytes(model: ModelConfig, layout: Layout, num_rows: int, num_tokens: int) -> int:
    """Return an estimate of the largest step: its activations, and the sampler's logits.

    On GPUs twice: the CUDA graphs' pool, and eager steps.
    """
    inner = model.intermediate_size
    if model.is_sparse(model.num_hidden_layers - 1):
        inner = model.moe_intermediate_size * model.num_experts_per_tok
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    per_token = 4 * model.hidden_size + (3 * inner + 2 * heads) // layout.tp
    activations = num_tokens * per_token * layout.element_bytes
    logits = 2 * num_rows * _vocabulary(model, layout) * 4
    rope = model.rope.num_positions * model.head_dim * 4
    step = activations + logits
    return rope + (2 * step + GPU_CONTEXT_BYTES if layout.on_gpus else step)
