"""Arithmetic of the memory that a model needs. It reads no file and knows no device.

Weights and KV cache are exact; what a step takes in addition is an estimate from above.
"""

import math
from typing import NamedTuple

from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.quantization import BLOCK, LINEAR, WeightFormat

RUN = 4096
"""token ids between which the vocabulary is cut on GPUs"""
SCALE_BYTES = 4
"""in packed integers with the zero point in the same word"""
INTEGER_GROUP = 64
"""columns of a scale of integers on CPUs"""
MAX_CPU_GROUP = 128
"""columns of a scale of a checkpoint's integers on CPUs"""
TEMPORARIES = 4
"""copies of a matrix while it becomes integers"""
GPU_CONTEXT_BYTES = 700 << 20
"""of the driver, and of compiled kernels, in each worker"""


class Layout(NamedTuple):
    """Choices that change how much memory a worker needs."""

    tp: int = 1
    on_gpus: bool = True
    expert_parallel: bool = False
    quantize_lm_head: bool = False
    fp8_kv_cache: bool = False
    integer_bits: int = 0
    """of the layers' matrices on CPUs; 0: not integers"""

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
    start: int = 0
    """while weights are loaded, before there is a KV cache"""

    def with_context(self, num_tokens: int) -> int:
        """Return all of it with a KV cache of `num_tokens`."""
        return max(self.start, self.weights + self.step + self.kv_per_token * num_tokens)

    def num_tokens(self, num_bytes: float) -> int:
        """Return the tokens whose keys and values fit into the rest of `num_bytes`; 0: none."""
        if num_bytes < self.start:
            return 0
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
        start=_start_bytes(model, layout) if layout.integer_bits else 0,
    )


def _start_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of all weights in float32, and of a matrix while it becomes integers."""
    largest = 2 * model.intermediate_size // layout.tp * model.hidden_size
    floats = layout._replace(integer_bits=0, quantize_lm_head=False)
    return weight_bytes(model, floats) + TEMPORARIES * largest * floats.element_bytes


def weight_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of a rank's parameters."""
    hidden, size = model.hidden_size, layout.element_bytes
    total = _outer_bytes(model, layout)
    norms = (2 * hidden + 2 * model.head_dim) * size
    for layer in range(model.num_hidden_layers):
        name = f"model.layers.{layer}"
        mlp = (_experts if model.is_sparse(layer) else _mlp)(model, layout, f"{name}.mlp")
        total += norms + _attention(model, layout, f"{name}.self_attn") + mlp
    return total


def _outer_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of embedding, last norm and output layer."""
    hidden, size = model.hidden_size, layout.element_bytes
    vocabulary = _vocabulary(model, layout) * hidden
    total = hidden * size  # the last norm
    if layout.integer_bits:
        number = 1 if model.tie_word_embeddings else 2
        total += number * vocabulary * (2 if model.own_dtype == "bfloat16" else size)
        return total + (_integers(vocabulary, 8) if layout.quantize_lm_head else 0)
    total += vocabulary * size
    if layout.quantize_lm_head:
        total += vocabulary + _vocabulary(model, layout) * SCALE_BYTES
    elif not model.tie_word_embeddings:
        total += vocabulary * size
    return total


def _vocabulary(model: ModelConfig, layout: Layout) -> int:
    run = RUN if layout.on_gpus and layout.tp > 1 else 1
    return -(-model.vocab_size // (run * layout.tp)) * run


def _attention(model: ModelConfig, layout: Layout, name: str) -> int:
    heads = model.num_attention_heads // layout.tp * model.head_dim
    kv = max(1, model.num_key_value_heads // layout.tp) * model.head_dim
    hidden = model.hidden_size
    qkv = model.format_of(name, *LINEAR[:3])
    bytes_of_qkv = _joined(qkv, layout, [heads, kv, kv], hidden)
    return bytes_of_qkv + _cut(model.format_of(name, LINEAR[3]), layout, hidden, heads, layout.tp)


def _mlp(model: ModelConfig, layout: Layout, name: str) -> int:
    inner, hidden = model.intermediate_size // layout.tp, model.hidden_size
    gate_up = _joined(model.format_of(name, *LINEAR[4:6]), layout, [inner, inner], hidden)
    return gate_up + _cut(model.format_of(name, LINEAR[6]), layout, hidden, inner, layout.tp)


def _experts(model: ModelConfig, layout: Layout, name: str) -> int:
    cut_by = 1 if layout.expert_parallel else layout.tp
    inner, hidden = model.moe_intermediate_size // cut_by, model.hidden_size
    number = model.expert_count // (layout.tp // cut_by)
    weight_format = model.format_of(f"{name}.experts.0", *LINEAR[4:])
    if model.is_packed and not layout.on_gpus:
        weight_format = None  # dequantized
    gate_up = _joined(weight_format, layout, [inner, inner], hidden)
    down = _cut(weight_format, layout, hidden, inner, cut_by)
    return number * (gate_up + down) + model.expert_count * hidden * layout.element_bytes


def _joined(
    weight_format: WeightFormat | None, layout: Layout, rows: list[int], columns: int
) -> int:
    """Return the bytes of adjacent weights."""
    after = weight_format and weight_format.after_cut(rows)
    return _matrix(after, layout, sum(rows), columns)


def _cut(
    weight_format: WeightFormat | None, layout: Layout, rows: int, columns: int, num_parts: int
) -> int:
    """Return the bytes of a weight with this rank's columns."""
    if weight_format and num_parts > 1:
        weight_format = weight_format.after_cut(columns=columns)
    return _matrix(weight_format, layout, rows, columns)


def _integers(number: int, bits: int) -> int:
    """Return the bytes of integers in the layout of `kernels.cpu.integers`."""
    return number * bits // 8 + number // INTEGER_GROUP * SCALE_BYTES


def _matrix(weight_format: WeightFormat | None, layout: Layout, rows: int, columns: int) -> int:
    if layout.integer_bits:
        return _integers(rows * columns, layout.integer_bits)
    if weight_format is None:
        return rows * columns * layout.element_bytes
    if not (weight_format.is_fp8 or layout.on_gpus):
        return rows * _cpu_row(weight_format, layout, columns)
    if weight_format.scales == "rows":
        return rows * (columns + SCALE_BYTES)
    blocks = -(-columns // BLOCK)
    if weight_format.scales == "blocks":
        return rows * columns + -(-rows // BLOCK) * blocks * SCALE_BYTES
    groups = -(-columns // (weight_format.group_size or columns))
    order = 4 * columns if weight_format.act_order else 0
    return rows * (blocks * BLOCK * weight_format.bits // 8 + groups * SCALE_BYTES) + order


def _cpu_row(weight_format: WeightFormat, layout: Layout, columns: int) -> int:
    """Return the bytes of a row of integers, or of its numbers where they are dequantized."""
    group = math.gcd(weight_format.group_size, columns, MAX_CPU_GROUP)
    if columns % INTEGER_GROUP or weight_format.act_order or layout.fp8_kv_cache:
        return columns * layout.element_bytes
    return columns * weight_format.bits // 8 + columns // group * 2 * SCALE_BYTES


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
    if model.weight_format and not model.fp8:  # the largest matrix, dequantized for many rows
        step += 4 * model.hidden_size * model.intermediate_size // layout.tp
    return rope + (2 * step + GPU_CONTEXT_BYTES if layout.on_gpus else step)
