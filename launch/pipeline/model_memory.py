"""Estimate of the memory that a model needs. It reads no file and knows no device.

The KV cache is exact. Weights are within 2 %, experts of integers that are cut into narrow parts
within 6 %. What a step takes is an estimate from above.
"""

from typing import NamedTuple

from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.config import Config

DEFAULTS = Config()
RUN = 4096  # token ids between which the vocabulary is cut on GPUs
SCALE_BITS = 32  # of the scale of a group of integers, with its zero point on GPUs
INTEGER_GROUP = 64  # columns of a scale of integers on CPUs
TEMPORARIES = 4  # copies of a matrix while it becomes integers
# of the driver, compiled kernels and the allocator's rounding in each worker: at most 1,140 MiB of
# 0.6B and 8B on an H200
GPU_CONTEXT_BYTES = 1200 << 20


class Layout(NamedTuple):
    """Choices that change how much memory a worker needs."""

    tp: int = 1
    on_gpus: bool = True
    quantize_lm_head: bool = False
    fp8_kv_cache: bool = False
    integer_bits: int = 0  # of the layers' matrices on CPUs; 0: not integers

    @property
    def element_bytes(self) -> int:
        """Return the bytes of a number that is not quantized."""
        return 2 if self.on_gpus else 4


class Needs(NamedTuple):
    """Memory of each worker, bytes."""

    weights: int
    kv_per_token: int
    step: int  # of the largest step, in addition
    start: int = 0  # while weights are loaded, before there is a KV cache

    def with_context(self, num_tokens: int) -> int:
        """Return all of it with a KV cache of `num_tokens`."""
        return max(self.start, self.weights + self.step + self.kv_per_token * num_tokens)

    def num_tokens(self, num_bytes: float) -> int:
        """Return the tokens whose keys and values fit into the rest of `num_bytes`; 0: none."""
        if num_bytes < self.start:
            return 0
        return max(0, int((num_bytes - self.weights - self.step) // self.kv_per_token))


def needs(model: ModelConfig, layout: Layout) -> Needs:
    """Return what each worker needs, with the default limits of a step."""
    num_kv_heads = max(1, model.num_key_value_heads // layout.tp)
    scale_bytes = 4 if layout.fp8_kv_cache else 0
    head_bytes = model.head_dim * (1 if layout.fp8_kv_cache else layout.element_bytes) + scale_bytes
    return Needs(
        weights=weight_bytes(model, layout),
        kv_per_token=2 * model.num_hidden_layers * num_kv_heads * head_bytes,
        step=_step_bytes(model, layout),
        start=_start_bytes(model, layout) if layout.integer_bits else 0,
    )


def weight_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of a rank's weights."""
    hidden = model.hidden_size
    heads = model.num_attention_heads + max(layout.tp, model.num_key_value_heads)
    attention = 2 * hidden * model.head_dim * heads
    num_bits = 0.0
    for layer in range(model.num_hidden_layers):
        num_bits += attention * _num_bits(model, layout)
        if model.is_sparse(layer):
            inner = model.expert_count * model.moe_intermediate_size
            num_bits += 3 * hidden * inner * _num_bits(model, layout, of_experts=True)
        else:
            num_bits += 3 * hidden * model.intermediate_size * _num_bits(model, layout)
    return int(num_bits / 8) // layout.tp + _outer_bytes(model, layout)


def _vocabulary(model: ModelConfig, layout: Layout) -> int:
    """Return a rank's part, which on GPUs consists of whole runs."""
    run = RUN if layout.on_gpus and layout.tp > 1 else 1
    return -(-model.vocab_size // (run * layout.tp)) * run


def _outer_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of embedding and output layer."""
    number, size = _vocabulary(model, layout) * model.hidden_size, layout.element_bytes
    if layout.integer_bits and model.own_dtype == "bfloat16":
        size = 2
    # on CPUs the head of integers is added to the one of floats
    is_float = bool(layout.integer_bits) or not layout.quantize_lm_head
    num_copies = 1 + (is_float and not model.tie_word_embeddings)
    return number * (num_copies * size + layout.quantize_lm_head)


def _num_bits(model: ModelConfig, layout: Layout, of_experts: bool = False) -> float:
    """Return the bits of a number of the layers' matrices, with its part of a scale."""
    weight_format = model.weight_format
    if layout.integer_bits:
        return layout.integer_bits + SCALE_BITS / INTEGER_GROUP
    is_dequantized = model.is_packed and of_experts and not layout.on_gpus
    if weight_format is None or is_dequantized:
        return 8 * layout.element_bytes
    scales = SCALE_BITS if layout.on_gpus else 2 * SCALE_BITS
    group = weight_format.group_size
    return weight_format.bits + (scales / group if group else 0)


def _start_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of all weights in float32, and of a matrix while it becomes integers."""
    largest = 2 * model.intermediate_size // layout.tp * model.hidden_size
    floats = layout._replace(integer_bits=0, quantize_lm_head=False)
    return weight_bytes(model, floats) + TEMPORARIES * largest * floats.element_bytes


def _step_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return an estimate of the largest step: its activations, and the sampler's logits.

    On GPUs twice: the CUDA graphs' pool, and eager steps.
    """
    inner = model.intermediate_size
    if model.is_sparse(model.num_hidden_layers - 1):
        inner = model.moe_intermediate_size * model.num_experts_per_tok
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    per_token = 4 * model.hidden_size + (3 * inner + 2 * heads) // layout.tp
    step = DEFAULTS.max_num_batched_tokens * per_token * layout.element_bytes
    step += 2 * DEFAULTS.max_num_seqs * _vocabulary(model, layout) * 4
    rope = model.rope.num_positions * model.head_dim * 4
    if model.is_packed:  # the largest matrix, dequantized for many rows
        step += 4 * model.hidden_size * model.intermediate_size // layout.tp
    return rope + (2 * step + GPU_CONTEXT_BYTES if layout.on_gpus else step)
