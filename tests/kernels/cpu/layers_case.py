"""Layers of random weights, their inputs, and what they compute by the kernels in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.attention.backends import attend
from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.cpu import compiler
from penstock.kernels.cpu.compiled_layers import CompiledLayers
from penstock.kernels.cpu.types import MATRICES, LayerShape, LayerWeights, Matrix
from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear.linear import linear_add, norm_linear, norm_swiglu
from penstock.kernels.packed.matrices import Integers, pack, quantize
from penstock.models.layers import rope_table

SHAPE = LayerShape(hidden=72, heads=6, kv_heads=2, head_dim=32, intermediate=102, eps=1e-6)
WHOLE_GROUPS = SHAPE._replace(hidden=128, intermediate=192)
"""sizes that integers can have"""
LENGTHS = [1, 2, 15, 16, 17, 40, 70]
NUM_LAYERS = 2
MIXED = 0
BLOCK = 16


def avx2() -> compiler.Target:
    """Return this CPU without AVX-512, which has tiles of other sizes."""
    features = compiler.host().features.split(",")
    plain = [name for name in features if "512" not in name and "256" not in name]
    return compiler.target("haswell", ",".join([*plain, "-avx512f"]), has_wide_registers=False)


def random_layers(shape: LayerShape, dtype: torch.dtype) -> list[LayerWeights]:
    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return torch.rand(size) + 0.5

    return [
        LayerWeights(
            norm(shape.hidden),
            matrix(shape.qkv, shape.hidden),
            norm(shape.head_dim),
            norm(shape.head_dim),
            matrix(shape.hidden, shape.heads * shape.head_dim),
            norm(shape.hidden),
            matrix(2 * shape.intermediate, shape.hidden),
            matrix(shape.hidden, shape.intermediate),
        )
        for _ in range(NUM_LAYERS)
    ]


def make_batch(
    rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int], block: int = BLOCK
) -> ForwardBatch:
    """Return a step with the last `counts` tokens of sequences; rows: their places in the cache."""
    max_blocks = -(-max(LENGTHS) // block)
    tables = torch.randperm(
        len(LENGTHS) * max_blocks, generator=torch.Generator().manual_seed(1)
    ).view(len(LENGTHS), max_blocks)[list(rows)]
    at = [torch.arange(end - n, end) for n, end in zip(counts, lengths, strict=True)]
    positions = torch.cat(at)
    row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return ForwardBatch(
        BatchShape(len(counts), len(row), 0, 0, 64, max(counts), max(lengths)),
        input_ids=positions,
        positions=positions,
        slot_mapping=tables[row, positions // block] * block + positions % block,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        context_lens=torch.tensor(lengths).int(),
        decode_lens=torch.zeros(0),
        tiles=torch.zeros(0),
        block_tables=tables.int(),
    )


def empty_cache(shape: LayerShape) -> list[KVCache]:
    num_blocks = len(LENGTHS) * -(-max(LENGTHS) // BLOCK)
    size = num_blocks, BLOCK, shape.kv_heads, shape.head_dim
    return [KVCache(torch.zeros(size), torch.zeros(size)) for _ in range(NUM_LAYERS)]


def integer_layers(shape: LayerShape, bits: int) -> list[LayerWeights]:
    layers = random_layers(shape, torch.float32)
    matrices = [{name: quantize(getattr(one, name), bits) for name in MATRICES} for one in layers]
    return [one._replace(**own) for one, own in zip(layers, matrices, strict=True)]


def mixed_layers(shape: LayerShape) -> list[LayerWeights]:
    """Return layers whose matrices are of several kinds."""
    first, second = integer_layers(shape, 4)
    plain, half = random_layers(shape, torch.bfloat16)[0], random_layers(shape, torch.float16)[1]
    codes = torch.randint(-128, 128, plain.down.shape)
    scale = torch.rand(len(codes), codes.shape[1] // 32, 2) / codes.shape[1]
    down = Integers(pack(codes, 8), scale)
    return [first._replace(o=plain.o, down=down), second._replace(qkv=half.qkv, down=half.down)]


class Case:
    """Layers, and the residual stream of all tokens of all sequences before and after them."""

    def __init__(
        self, kind: torch.dtype | int = torch.float32, target: compiler.Target | None = None
    ) -> None:
        """Compile layers of a type, or of integers of 8 or 4 bits, or of several (`MIXED`)."""
        self.shape = shape = WHOLE_GROUPS if isinstance(kind, int) else SHAPE
        if isinstance(kind, int):
            self.layers = mixed_layers(shape) if kind == MIXED else integer_layers(shape, kind)
        else:
            self.layers = random_layers(shape, kind)
        self.compiled = CompiledLayers(self.layers, shape, BLOCK, target)
        self.rope = rope_table(shape.head_dim, max(LENGTHS), 1e4)
        self.inputs = list(torch.randn(sum(LENGTHS), shape.hidden).split(LENGTHS))
        self.caches = empty_cache(shape)
        self.outputs = self.run(range(len(LENGTHS)), LENGTHS, LENGTHS)

    def run(
        self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int]
    ) -> list[Tensor]:
        """Return the rows' outputs of a step with their tokens before `lengths`."""
        parts = [
            self.inputs[row][length - count : length]
            for row, count, length in zip(rows, counts, lengths, strict=True)
        ]
        residual = torch.cat(parts)
        self.compiled.begin(make_batch(rows, counts, lengths), self.rope, self.caches)
        self.compiled.run(range(2 * NUM_LAYERS), residual)
        return list(residual.split(list(counts)))


def by_token(cache: Tensor) -> Tensor:
    """Return a cache of compiled layers, in which a head's keys lie side by side, as the usual."""
    num_blocks, block_size, num_heads, size = cache.shape
    return cache.view(num_blocks, num_heads, block_size, size).transpose(1, 2)


def rounded(x: Tensor) -> Tensor:
    """Return activations as products with integers take them: 8 bits in blocks of 32 columns."""
    blocks = x.view(-1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).round() * scale).view_as(x)


def wide(matrix: Matrix) -> Tensor:
    return matrix.dequantized() if isinstance(matrix, Integers) else matrix.float()


def reference(case: Case) -> Tensor:
    """Return the outputs of all tokens, by the kernels in torch; integers as float32."""
    batch, caches = make_batch(range(len(LENGTHS)), LENGTHS, LENGTHS), empty_cache(case.shape)
    residual = torch.cat(case.inputs)
    for layer, cache in zip(case.layers, caches, strict=True):
        qkv, o, gate_up, down = (wide(getattr(layer, name)) for name in MATRICES)
        q = qk_norm_rope_store(
            norm_linear(residual, layer.input_norm, case.shape.eps, qkv),
            num_heads=case.shape.heads,
            num_kv_heads=case.shape.kv_heads,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            rope=case.rope,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            kv_cache=cache,
            eps=case.shape.eps,
        )
        attended = attend(
            q,
            cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=max(LENGTHS),
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=case.shape.head_dim**-0.5,
        )
        residual = linear_add(attended.flatten(1), o, residual)
        inner = norm_swiglu(residual, layer.post_norm, case.shape.eps, gate_up)
        residual = linear_add(inner, down, residual)
    most = 1e-5 if isinstance(case.layers[0].qkv, Tensor) else 0.15
    for own, its in zip(case.caches, caches, strict=True):
        torch.testing.assert_close(by_token(own.k), its.k, atol=most, rtol=1e-5)
        torch.testing.assert_close(by_token(own.v), its.v, atol=most, rtol=1e-5)
    return residual
