"""Compiled layers: the results of the torch reference, in bits that depend on nothing else."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import compiled_layers, compiler
from penstock.kernels.cpu.compiled_layers import CompiledLayers
from penstock.kernels.cpu.llvm_products import PACKED
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear.linear import linear_add, norm_swiglu
from tests.kernels.cpu.layers_case import (
    BLOCK,
    LENGTHS,
    MIXED,
    NUM_LAYERS,
    SHAPE,
    Case,
    avx2,
    empty_cache,
    make_batch,
    random_layers,
    reference,
)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make_target", [compiler.host, avx2])
def test_layers_compute_what_the_reference_computes(
    kind: torch.dtype, make_target: Callable[[], compiler.Target]
) -> None:
    case = Case(kind, make_target())
    torch.testing.assert_close(torch.cat(case.outputs), reference(case), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "make_target"),
    [
        (torch.bfloat16, compiler.host),
        (torch.bfloat16, avx2),
        (8, compiler.host),
        (4, avx2),
        (MIXED, avx2),
    ],
)
def test_bits_of_a_row_depend_on_no_other_row_and_no_chunk(
    kind: torch.dtype | int, make_target: Callable[[], compiler.Target]
) -> None:
    case = Case(kind, make_target())
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


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make_target", [compiler.host, avx2])
def test_bits_of_a_long_row_depend_on_no_other_row(
    kind: torch.dtype, make_target: Callable[[], compiler.Target]
) -> None:
    """Columns of a weight are packed for many rows, in parts, and there are blocks of rows."""
    shape = SHAPE._replace(hidden=2 * PACKED + 452)
    head = torch.randn(141, shape.hidden).to(kind)
    layers = random_layers(shape, kind)
    compiled = CompiledLayers(layers, shape, BLOCK, make_target(), head=head)
    x, norm = torch.randn(80, shape.hidden), torch.ones(shape.hidden)
    together = compiled.logits(x, norm, shape.eps, head)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + shape.eps).rsqrt()
    torch.testing.assert_close(together.double(), normed @ head.double().T, atol=2e-4, rtol=1e-5)
    for number in (1, 2, 3, 4, 6, 7, 67):
        some = compiled.logits(x[-number:], norm, shape.eps, head)
        assert torch.equal(some, together[-number:])


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_bits_do_not_depend_on_the_number_of_threads(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number may change from call to call."""
    case = Case()
    one = case.compiled
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    case.compiled = CompiledLayers(case.layers, SHAPE, BLOCK)
    numbers = itertools.cycle((num_threads, 1, 9, 2))
    monkeypatch.setattr(compiled_layers, "_num_threads", lambda *_: next(numbers))
    for _ in range(6):
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
