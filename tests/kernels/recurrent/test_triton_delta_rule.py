"""The gated delta rule in torch and in Triton, against a plain loop in float64."""

from collections.abc import Callable
from random import Random

import pytest
import torch

from penstock.kernels.recurrent import delta_rule
from tests.kernels.conftest import on_gpu
from tests.kernels.recurrent.cases import (
    Layer,
    Row,
    Sequenced,
    Sizes,
    Weights,
    assert_right,
    loop,
    relative_error,
)
from tests.search import in_long

gpu = pytest.importorskip("penstock.kernels.recurrent.triton_delta_rule")
SMALL = Sizes(1, 2, 32)
SIZES = [SMALL, in_long(Sizes(2, 6, 64)), on_gpu(Sizes(16, 48, 128))]


RULES = {"torch": delta_rule.gated_delta_rule, "triton": gpu.gated_delta_rule}
Make = Callable[[Sizes], Layer]


@pytest.fixture(params=RULES)
def layer_of(request: pytest.FixtureRequest, device: str, dtype: torch.dtype) -> Make:
    """Return a function that makes a layer; tensors on a GPU are always computed in Triton."""
    rule = RULES[request.param]
    return lambda sizes: Layer(Weights.random(sizes, dtype, device), 32, rule)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_windows_change_no_bit(sizes: Sizes, layer_of: Make) -> None:
    layer, random = layer_of(sizes), Random(1)
    plain = [Sequenced(layer.weights, num) for num in (12, 9)]
    while any(sequence.left for sequence in plain):
        layer.step([Row(sequence, 1, 1) for sequence in plain if sequence.left])
    drafted = [sequence.again() for sequence in plain]
    while rows := [one.drafted(random, 1) for one in drafted if one.left > 1]:
        layer.step(rows, num_padded=random.randint(0, 2))
    layer.step([Row(sequence, 1, 1) for sequence in drafted], num_padded=1)
    for one, other in zip(plain, drafted, strict=True):
        assert_right(layer.weights, one)
        assert torch.equal(one.outputs, other.outputs)
        assert torch.equal(layer.state_of(one), layer.state_of(other))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tile_size", [64, in_long(128)])
def test_chunks_of_a_prompt(sizes: Sizes, tile_size: int, layer_of: Make) -> None:
    layer = layer_of(sizes)
    whole = [Sequenced(layer.weights, num, num) for num in (1, 150, 64)]
    layer.step([Row(one, one.left) for one in whole], num_padded=2, tile_size=tile_size)
    parts = [one.again() for one in whole]
    layer.step([Row(one, min(one.left, 64)) for one in parts])
    layer.step([Row(one, one.left) for one in parts if one.left])
    for one, other in zip(whole, parts, strict=True):
        assert_right(layer.weights, one)
        assert torch.equal(one.outputs, other.outputs)
        states = layer.state_of(one), layer.state_of(other)
        assert torch.equal(*states)
        assert relative_error(states[0], loop(layer.weights, one.inputs)[1][-1]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_sampled_tokens_that_are_computed_again(sizes: Sizes, layer_of: Make) -> None:
    layer, random = layer_of(sizes), Random(2)
    first = [Sequenced(layer.weights, num + 6, num) for num in (70, 3)]
    layer.step([Row(one, one.num_prompt) for one in first])
    while rows := [one.drafted(random, 1) for one in first if one.left > 1]:
        layer.step(rows)
    layer.step([Row(one, 1, 1) for one in first])
    again = [one.again() for one in first]
    layer.step([Row(one, one.left - 1) for one in again])
    layer.step([Row(one, 1, 1) for one in again])
    for one, other in zip(first, again, strict=True):
        assert_right(layer.weights, one)
        assert torch.equal(one.outputs, other.outputs)
        assert torch.equal(layer.state_of(one), layer.state_of(other))


def test_sequences_of_all_kinds_in_one_step(layer_of: Make) -> None:
    layer, random = layer_of(SMALL), Random(3)
    decoding = [Sequenced(layer.weights, num) for num in (9, 5)]
    resumed, chunked, new = (Sequenced(layer.weights, num, 74) for num in (8, 74, 3))
    resumed.num_prompt = 3
    layer.step([Row(one, 4, 3) for one in (*decoding, resumed)])
    layer.step([Row(decoding[0], 1, 1), Row(chunked, 10)], num_padded=1)
    # `resumed` follows its window and is prefilled; `chunked` begins within a chunk
    rows = [one.drafted(random) for one in decoding]
    layer.step([*rows, Row(resumed, 5), Row(chunked, 64), Row(new, 3)], num_padded=2)
    for one in (*decoding, resumed, chunked, new):
        assert_right(layer.weights, one)


def test_a_step_that_keeps_nothing(layer_of: Make) -> None:
    layer = layer_of(SMALL)
    rows = [Sequenced(layer.weights, num, 66) for num in (1, 66)]
    for one in rows:
        one.blocks = [-1, -1]
    layer.step([Row(rows[0], 1, 1), Row(rows[1], 66)])
    for one in rows:
        assert_right(layer.weights, one)
    assert all(part[:-1].isnan().all() for part in layer.states.layers[0])
