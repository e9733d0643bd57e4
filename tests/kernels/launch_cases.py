"""Launches of each kernel with tensors that have no memory, by the wrappers that the worker calls.

Modules of kernels are imported late: they read the properties of the simulated GPU.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch
from penstock.kernels.matrices import FP8, Quantized
from penstock.kernels.packed.matrices import Packed

HEAD_DIM = 128
WIDE_HEAD = 256  # of Qwen3.5
HIDDEN = 5120
EXPERTS, TOP_K = 128, 8
VOCABULARY = 151936
ATTENTION = ((16, 8, 16), (40, 8, 128), (64, 4, 128))
"""(query heads, KV heads, tokens of a block)"""
MOE_TOKENS = (1, 64, 256, 1024, 2048)
"""a number for each entry of the table of tile sizes"""
PRODUCTS = (
    ("add", 1024, 3072),
    ("add", HIDDEN, 25600),
    ("norm", 10240, HIDDEN),
    ("swiglu", 2 * 25600, HIDDEN),
    ("logits", VOCABULARY, HIDDEN),
)
"""(kind, rows of the weight, inner dimension)"""
ints = partial(torch.empty, dtype=torch.int32)
longs = partial(torch.empty, dtype=torch.int64)
activations = torch.bfloat16
"""their type, which `record` changes"""


def numbers(*shape: int) -> Tensor:
    """Return activations, or weights of 16 bits."""
    return torch.empty(shape, dtype=activations)


def record(launches: Any) -> None:
    """Launch all kernels, each with its larger tiles later."""
    global activations
    for activations, is_fp8 in product((torch.bfloat16, torch.float16), (False, True)):
        launches.case = "fp8" if is_fp8 else str(activations).removeprefix("torch.")
        if is_fp8 and activations == torch.float16:
            _few_in_fp8()
        else:
            _all(is_fp8)
            _elementwise()
            _recurrent()
        launches.case = "packed"
        for one in product((8, 4), (32, 128), (1, 128, 64)) if not is_fp8 else ():
            _packed(*one)
    _others()


def _few_in_fp8() -> None:
    """Launch one of each kernel that reads 8 bits."""
    decode(*ATTENTION[0], 16, True)
    _prefill(128, 128, True)
    _experts(256, True)
    _many_rows(512)
    _products(True, [("add", HIDDEN, 25600, 16), ("swiglu", 2 * 25600, HIDDEN, 1)])
    _rope(True)


def _all(is_fp8: bool) -> None:
    from tests.kernels.deterministic_cases import deterministic

    for heads, rows in product(ATTENTION, (16, 64, 256)):
        decode(*heads, rows, is_fp8)
    for block_size, tile_size in product((16, 128), (64, 128)):
        _prefill(block_size, tile_size, is_fp8)
        _prefill(block_size, tile_size, is_fp8, WIDE_HEAD)
    for rows in (16, 64, 256):
        decode(24, 4, 128, rows, is_fp8, head_dim=WIDE_HEAD)
    for tokens in MOE_TOKENS:
        _experts(tokens, is_fp8)
    for rows in (16, 64, 512) if is_fp8 else ():
        _many_rows(rows)
    _products(is_fp8)
    _rope(is_fp8)
    deterministic(is_fp8)


def _packed(bits: int, group: int, rows: int) -> None:
    """Multiply with packed integers, dense and in experts."""
    from penstock.kernels.packed.triton_packed import dequantized, multiply
    from penstock.kernels.triton_moe import experts

    def weight(*shape: int, order: bool = False) -> Packed:
        *others, num_rows, columns = shape
        groups = *others, columns // group, num_rows
        words = ints(*others, columns // 128, num_rows, 4 * bits)
        places = ints(*others, columns) if order else None
        return Packed(words, ints(*groups), places, columns, group)

    x = numbers(rows, HIDDEN)
    multiply("swiglu", x, weight(2 * 25600, HIDDEN), numbers(HIDDEN), 1e-6)
    multiply("add", x, weight(1024, HIDDEN, order=True), None, 0.0, numbers(rows, 1024))
    dequantized(weight(1024, HIDDEN), activations)
    x = numbers(16 * rows, 2048)
    gate_up, down = weight(EXPERTS, 2 * 768, 2048), weight(EXPERTS, 2048, 768)
    experts(x, torch.empty(len(x), EXPERTS), gate_up, down, TOP_K, True, residual=x)


def cache_of(block_size: int, kv_heads: int, is_fp8: bool, head_dim: int = HEAD_DIM) -> Any:
    from penstock.kernels.layouts.kv_cache import KVCache

    shape = 64, block_size, kv_heads, head_dim
    k, v = (torch.empty(shape, dtype=FP8 if is_fp8 else activations) for _ in range(2))
    scales = torch.empty(64, kv_heads, block_size), torch.empty(64, kv_heads, block_size)
    return KVCache(k, v, scales if is_fp8 else None)


def decode(
    heads: int,
    kv_heads: int,
    block_size: int,
    rows: int,
    is_fp8: bool,
    kind: Any = None,
    head_dim: int = HEAD_DIM,
) -> None:
    from penstock.kernels.attention.triton_decode import DecodeAttention

    sizes = 256, heads, kv_heads, head_dim, block_size
    attention = (kind or DecodeAttention)(*sizes, "meta", is_fp8=is_fp8)
    lengths, q = ints(rows), numbers(rows, heads, head_dim)
    attention.plan(lengths)
    attention(
        q,
        cache_of(block_size, kv_heads, is_fp8, head_dim),
        context_lens=lengths,
        block_tables=ints(rows, 64),
        scale=0.1,
        out=torch.empty_like(q),
    )


def _prefill(block_size: int, tile_size: int, is_fp8: bool, head_dim: int = HEAD_DIM) -> None:
    """Launch for a step whose tiles are cut, and for one with many tiles."""
    from penstock.kernels.attention.triton_prefill import PrefillAttention

    attention = PrefillAttention(32, head_dim, block_size, "meta", is_fp8=is_fp8, num_programs=264)
    for num_tiles in (64, 300) if block_size == 128 else (64,):
        batch = prefill_batch(num_tiles, tile_size)
        attention.plan(batch)
        q = numbers(256, 32, head_dim)
        cache = cache_of(block_size, 8, is_fp8, head_dim)
        attention(q, cache, batch, 0.1, torch.empty_like(q))


def prefill_batch(num_tiles: int, tile_size: int) -> ForwardBatch:
    """Return what prefill attention reads of a step's four rows."""
    shape = BatchShape(4, 256, 0, num_tiles, tile_size, 256, 4096)
    others = dict.fromkeys(ForwardBatch._fields[1:-1], ints(4))
    tensors = {"cu_seqlens_q": ints(5), "tiles": ints(num_tiles, 2), "block_tables": ints(4, 64)}
    return ForwardBatch(shape, **(others | tensors))


def _rope(is_fp8: bool) -> None:
    from penstock.kernels.attention.triton_rope import qk_norm_rope_store

    weights = numbers(HEAD_DIM), numbers(HEAD_DIM)
    step = torch.empty(4096, HEAD_DIM), longs(64), longs(64)
    qkv, cache = numbers(64, 48 * HEAD_DIM), cache_of(128, 8, is_fp8)
    qk_norm_rope_store(qkv, weights, *step, cache, 1e-6)
    wide = torch.empty(WIDE_HEAD), torch.empty(WIDE_HEAD)
    step = torch.empty(4096, WIDE_HEAD // 4), longs(64), longs(64)
    qkv, cache = numbers(64, 56 * WIDE_HEAD), cache_of(128, 4, is_fp8, WIDE_HEAD)
    qk_norm_rope_store(qkv, wide, *step, cache, 1e-6, gated=True)


def weight_of(is_fp8: bool, *shape: int) -> Tensor | Quantized:
    """Return a weight in bfloat16, or in 8 bits with scales of blocks."""
    if not is_fp8:
        return numbers(*shape)
    *others, rows, columns = shape
    blocks = -(-rows // 128), -(-columns // 128)
    return Quantized(torch.empty(shape, dtype=FP8), torch.empty(*others, *blocks))


def _experts(tokens: int, is_fp8: bool) -> None:
    from penstock.kernels.triton_moe import experts, norm_and_logits, router_logits

    x, size = numbers(tokens, 2048), 768
    gate_up = weight_of(is_fp8, EXPERTS, 2 * size, 2048)
    down = weight_of(is_fp8, EXPERTS, 2048, size)
    if tokens <= 64:
        router_logits(x, numbers(EXPERTS, 2048))
    for shared in (False, True):
        experts(x, torch.empty(tokens, EXPERTS), gate_up, down, TOP_K, True, 0, shared, x)
    if tokens == 1:  # experts of Qwen3.5-35B-A3B
        gate_up, down = weight_of(is_fp8, 256, 1024, 2048), weight_of(is_fp8, 256, 2048, 512)
        experts(x, torch.empty(1, 256), gate_up, down, TOP_K, True, 0, True, x)
        norm_and_logits(x, numbers(2048), 1e-6, numbers(257, 2048))


def _many_rows(rows: int) -> None:
    """Multiply by weights of 8 bits on tensor cores for 8 bits, otherwise widened to 16."""
    from penstock.kernels.device import this_device
    from penstock.kernels.linear.triton_fp8_gemm import block_product, weight_only_product

    weight = weight_of(True, 2560, HIDDEN)
    assert isinstance(weight, Quantized)
    if this_device().has_fp8:
        block_product(
            Quantized(torch.empty(rows, HIDDEN, dtype=FP8), torch.empty(rows), activations), weight
        )
        return
    for scale in (weight.scale, torch.empty(len(weight))):
        for out_dtype in (None, torch.float32):
            product = Quantized(weight.values, scale)
            weight_only_product(numbers(rows, HIDDEN), product, out_dtype=out_dtype)


def _products(is_fp8: bool, some: list[tuple[str, int, int, int]] | None = None) -> None:
    """Multiply by some weights, otherwise by all in the table that holds, and of Qwen3's sizes."""
    from penstock.kernels.device import this_device
    from penstock.kernels.linear.small_m_gemm import multiply
    from penstock.kernels.linear.tuning_tables import tuning_tables

    all_rows = product(PRODUCTS, (1, 16, 32, 64))
    chosen = {(*one, rows): None for one, rows in all_rows}
    chosen |= dict.fromkeys(tuning_tables(this_device())["fp8" if is_fp8 else "bfloat16"])
    for kind, num_weights, inner, rows in some or chosen:
        residual = numbers(rows, num_weights) if kind == "add" else None
        norm = None if kind == "add" else numbers(inner)
        weight = weight_of(is_fp8, num_weights, inner)
        multiply(kind, numbers(rows, inner), weight, norm, 1e-6, residual)


def _elementwise() -> None:
    """Launch the kernels of activations that have one size of tile."""
    from penstock.kernels import triton_elementwise
    from penstock.kernels.triton_collectives import PushAllReduce, inbox_size

    x = numbers(64, HIDDEN)
    triton_elementwise.rms_norm(x, numbers(HIDDEN), 1e-6)
    triton_elementwise.silu_and_mul(x)
    triton_elementwise.sigmoid_and_mul(numbers(64, 24, 256), numbers(64, 24, 256))
    three = (numbers(64, HIDDEN) for _ in range(3))
    triton_elementwise.add_gated(*three, numbers(HIDDEN), 1e-6, numbers(1, HIDDEN))
    triton_elementwise.embedding(longs(64), numbers(VOCABULARY, HIDDEN))
    triton_elementwise.quantize(x, numbers(HIDDEN), 1e-6, False)
    triton_elementwise.quantize(numbers(64, 2 * 25600), None, 0.0, True)
    inbox = ints(inbox_size(1 << 20, 2))
    PushAllReduce(inbox, [0, 1 << 24], 0, 1 << 20)(x, x)


def _recurrent() -> None:
    """Launch the gated delta rule of Qwen3.5-27B and its norm, in decode and in mixed steps."""
    from penstock.kernels import triton_states
    from penstock.kernels.layouts.states import _BITS, StateStep
    from penstock.kernels.recurrent.triton_delta_rule import gated_delta_rule
    from penstock.kernels.recurrent.triton_gated_norm import gated_rms_norm

    triton_states.begin(ints(64), _BITS, ints(65), ints(64), ints(64), ints(130, 2))
    triton_states.end(*(longs(64) for _ in range(3)), ints(64), ints(130, 2))
    key_heads, heads, size = 16, 48, 128
    channels = (2 * key_heads + heads) * size
    shapes = (heads, size, size), (3, channels), (8, channels), (heads, 8, 2)
    state = [torch.empty(64, *shape) for shape in shapes]
    for rows, num_decode, tokens, tiles in ((1, 1, 1, 0), (64, 64, 64, 0), (64, 60, 2048, 40)):
        step = StateStep([state], *(longs(rows) for _ in range(6)))
        batch = ForwardBatch(
            BatchShape(rows, tokens, num_decode, tiles, 128, 2048, 4096),
            *(longs(tokens), longs(tokens), longs(tokens), ints(rows + 1), ints(rows + 1)),
            *(ints(rows), ints(num_decode), ints(tiles, 2), ints(rows, 64), step),
        )
        inputs = numbers(tokens, channels), numbers(tokens, 2 * heads), numbers(channels, 4)
        gates = torch.empty(heads), torch.empty(heads)
        gated_delta_rule(*inputs, *gates, num_key_heads=key_heads, batch=batch, state=state)
    x = numbers(64, heads, size)
    gated_rms_norm(x, x, numbers(size), 1e-6)


def _others() -> None:
    """Launch the kernels that read no activations."""
    from penstock.kernels.layouts.step import make_slots, make_step_buffers
    from penstock.kernels.sampling.triton_sampling import sample
    from penstock.kernels.step.triton_apply_plan import apply_plan

    meta = torch.device("meta")
    slots = make_slots(256, 64, meta)
    _process_logits(meta)
    sample(torch.empty(64, VOCABULARY), longs(64), longs(64), slots.sampling())
    for tile_size in (64, 128):
        shape = BatchShape(64, 2048, 64, 48, tile_size, 2048, 4096)
        apply_plan(ints(4096), slots, make_step_buffers(256, 64, 4096, meta), shape, 16)


def _process_logits(meta: torch.device) -> None:
    """Launch the kernels that change logits, for a whole vocabulary and for a shard of it."""
    from penstock.kernels.layouts.sampling import make_logits_state, make_parameters
    from penstock.kernels.sampling import triton_logits

    for first_token, num_tokens in ((0, VOCABULARY), (VOCABULARY // 2, VOCABULARY // 2)):
        logits = torch.empty(64, num_tokens)
        state = make_logits_state(make_parameters(256, meta), VOCABULARY, first_token, num_tokens)
        for deferred in (False, True):
            triton_logits.process(logits, longs(64), longs(64), longs(64), state, deferred)
        triton_logits.mask(logits, state.bitmask, longs(64))
        triton_logits.top_logprobs(logits, longs(64), 20)
