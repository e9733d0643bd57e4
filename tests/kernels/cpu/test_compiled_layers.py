"""Compiled layers: the results of the torch reference, in bits that depend on nothing else."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.reference import attend
from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.attention.types import KVCache
from penstock.kernels.cpu import compiled_layers, compiler
from penstock.kernels.cpu.compiled_layers import CompiledLayers
from penstock.kernels.cpu.types import LayerShape, LayerWeights
from penstock.kernels.linear.linear import linear_add, norm_linear, norm_swiglu
from penstock.kernels.step.forward_batch import BatchShape, ForwardBatch
from penstock.models.rope_table import rope_table

SHAPE = LayerShape(hidden=72, heads=6, kv_heads=2, head_dim=32, intermediate=102, eps=1e-6)
LENGTHS = [1, 2, 15, 16, 17, 40, 70]
NUM_LAYERS = 2
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


class Case:
    """Layers, and the residual stream of all tokens of all sequences before and after them."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, target: compiler.Target | None = None
    ) -> None:
        self.layers = random_layers(SHAPE, dtype)
        self.compiled = CompiledLayers(self.layers, SHAPE, BLOCK, target)
        self.rope = rope_table(SHAPE.head_dim, max(LENGTHS), 1e4)
        self.inputs = list(torch.randn(sum(LENGTHS), SHAPE.hidden).split(LENGTHS))
        self.caches = empty_cache(SHAPE)
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


def reference(case: Case) -> Tensor:
    """Return the outputs of all tokens, by the kernels in torch."""
    batch, caches = make_batch(range(len(LENGTHS)), LENGTHS, LENGTHS), empty_cache(SHAPE)
    residual = torch.cat(case.inputs)
    for layer, cache in zip(case.layers, caches, strict=True):
        qkv, o, gate_up, down = (
            weight.float()
            for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)
            if weight is not None
        )
        q = qk_norm_rope_store(
            norm_linear(residual, layer.input_norm, SHAPE.eps, qkv),
            num_heads=SHAPE.heads,
            num_kv_heads=SHAPE.kv_heads,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            rope=case.rope,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            kv_cache=cache,
            eps=SHAPE.eps,
        )
        attended = attend(
            q,
            cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=max(LENGTHS),
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=SHAPE.head_dim**-0.5,
        )
        residual = linear_add(attended.flatten(1), o, residual)
        inner = norm_swiglu(residual, layer.post_norm, SHAPE.eps, gate_up)
        residual = linear_add(inner, down, residual)
    for own, its in zip(case.caches, caches, strict=True):
        torch.testing.assert_close(by_token(own.k), its.k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(by_token(own.v), its.v, atol=1e-5, rtol=1e-5)
    return residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_target", [compiler.host, avx2])
def test_layers_compute_what_the_reference_computes(
    dtype: torch.dtype, make_target: Callable[[], compiler.Target]
) -> None:
    case = Case(dtype, make_target())
    torch.testing.assert_close(torch.cat(case.outputs), reference(case), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("make_target", [compiler.host, avx2])
def test_bits_of_a_row_depend_on_no_other_row_and_no_chunk(
    make_target: Callable[[], compiler.Target],
) -> None:
    case = Case(torch.bfloat16, make_target())
    for row, length in enumerate(LENGTHS):
        (alone,) = case.run([row], [length], [length])
        assert torch.equal(alone, case.outputs[row])
        for size in (1, 3, 13):
            ends = [*range(size, length, size), length]
            chunks = [
                case.run([row], [end - begin], [end])[0]
                for begin, end in zip([0, *ends], ends, strict=False)
            ]
            assert torch.equal(torch.cat(chunks), case.outputs[row])
    last = case.run(range(len(LENGTHS)), [1] * len(LENGTHS), LENGTHS)
    assert all(torch.equal(a[0], b[-1]) for a, b in zip(last, case.outputs, strict=True))


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_bits_do_not_depend_on_the_number_of_threads(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()
    monkeypatch.setattr(compiled_layers, "_num_threads", lambda _: num_threads)
    one = case.compiled
    case.compiled = CompiledLayers(case.layers, SHAPE, BLOCK)
    for _ in range(5):
        outputs = case.run(range(len(LENGTHS)), LENGTHS, LENGTHS)
        assert all(map(torch.equal, outputs, case.outputs))
    x, norm, weight = torch.randn(5, SHAPE.hidden), torch.rand(SHAPE.hidden), case.layers[0].qkv
    arguments = x, norm, SHAPE.eps, weight[:141]
    assert torch.equal(case.compiled.logits(*arguments), one.logits(*arguments))


def test_nan_stays_in_its_row() -> None:
    case = Case()
    case.inputs[3] = torch.full_like(case.inputs[3], torch.nan)
    outputs = case.run(range(len(LENGTHS)), LENGTHS, LENGTHS)
    assert outputs[3].isnan().all()
    assert all(torch.equal(outputs[row], case.outputs[row]) for row in (0, 1, 2, 4, 5, 6))


def test_large_activations_do_not_overflow() -> None:
    case = Case()
    gate_up = case.layers[0].gate_up
    assert gate_up is not None
    gate_up *= 1000
    expected = reference_of_half(case, gate_up)
    residual = torch.cat(case.inputs)
    case.compiled.begin(make_batch(range(len(LENGTHS)), LENGTHS, LENGTHS), case.rope, case.caches)
    case.compiled.run(range(1, 2), residual)
    most = float(expected.abs().max())
    torch.testing.assert_close(residual, expected, atol=2e-6 * most, rtol=0.0)


def reference_of_half(case: Case, gate_up: Tensor) -> Tensor:
    residual, layer = torch.cat(case.inputs), case.layers[0]
    inner = norm_swiglu(residual, layer.post_norm, SHAPE.eps, gate_up)
    return linear_add(inner, layer.down, residual)


def test_a_target_receives_the_sums_and_the_residual_stays() -> None:
    case = Case()
    batch = make_batch(range(len(LENGTHS)), LENGTHS, LENGTHS)
    residual = torch.cat(case.inputs)
    before, part, whole = residual.clone(), torch.zeros_like(residual), residual.clone()
    case.compiled.begin(batch, case.rope, case.caches)
    case.compiled.run(range(1), residual, part)
    case.compiled.run(range(1), whole)
    assert torch.equal(residual, before)
    torch.testing.assert_close(before + part, whole)


@pytest.mark.parametrize("block", [1, 4, 8, 20, 24, 32, 256])
def test_bits_do_not_depend_on_the_size_of_a_block(block: int) -> None:
    case = Case()
    num_blocks = len(LENGTHS) * -(-max(LENGTHS) // block)
    size = num_blocks, block, SHAPE.kv_heads, SHAPE.head_dim
    caches = [KVCache(torch.zeros(size), torch.zeros(size)) for _ in range(NUM_LAYERS)]
    compiled = CompiledLayers(case.layers, SHAPE, block)
    residual = torch.cat(case.inputs)
    batch = make_batch(range(len(LENGTHS)), LENGTHS, LENGTHS, block)
    compiled.begin(batch, case.rope, caches)
    compiled.run(range(2 * NUM_LAYERS), residual)
    assert torch.equal(residual, torch.cat(case.outputs))


def test_padded_tokens_store_nothing() -> None:
    case = Case()
    caches = empty_cache(SHAPE)
    batch = make_batch([2], [15], [15])
    batch.slot_mapping[:] = -1
    case.compiled.begin(batch, case.rope, caches)
    case.compiled.run(range(1), case.inputs[2].clone())
    assert not any(cache.k.any() or cache.v.any() for cache in caches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 24}, "head_dim: got 24"),
        ({"intermediate": 101}, "intermediate_size: got 101"),
        ({"kv_heads": 3}, "qkv: got shape"),
    ],
)
def test_sizes_that_cannot_be_compiled_are_refused(change: dict[str, int], message: str) -> None:
    layers = random_layers(SHAPE, torch.float32)
    with pytest.raises(ValueError, match=message):
        CompiledLayers(layers, SHAPE._replace(**change), BLOCK)


def test_wrong_arguments_are_refused() -> None:
    case = Case()
    case.compiled.begin(make_batch([2], [15], [15]), case.rope, case.caches)
    with pytest.raises(ValueError, match="residual: got shape"):
        case.compiled.run(range(4), torch.zeros(14, SHAPE.hidden))
    with pytest.raises(ValueError, match="residual: got dtype"):
        case.compiled.run(range(4), torch.zeros(15, SHAPE.hidden, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="k_cache: got shape"):
        caches = empty_cache(SHAPE._replace(kv_heads=1))
        case.compiled.begin(make_batch([2], [15], [15]), case.rope, caches)
