"""The gated delta rule with the heads of Qwen3.5: bits in any order, and errors in float64."""

from random import Random

import pytest
import torch

from penstock.kernels.recurrent.triton_delta_rule import gated_delta_rule
from tests.gpu.delta_rule import MODELS
from tests.kernels.recurrent.cases import Layer, Row, Sequenced, Sizes, Weights, assert_right

NUM_PROMPTS = (1, 63, 64, 65, 500, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_do_not_depend_on_the_steps(sizes: Sizes, dtype: torch.dtype) -> None:
    layer = Layer(Weights.random(sizes, dtype, "cuda"), 48, gated_delta_rule)
    plain = [Sequenced(layer.weights, num + 40, num) for num in NUM_PROMPTS]
    for one in plain:
        layer.step([Row(one, one.num_prompt)], tile_size=128)
    while plain[0].left:
        layer.step([Row(one, 1, 1) for one in plain])
    drafted = _in_pieces(layer, [one.again() for one in plain], Random(1))
    again = [one.again() for one in plain]
    layer.step([Row(one, one.left - 1) for one in again], tile_size=128)
    layer.step([Row(one, 1, 1) for one in again], num_padded=3)
    for first, *others in zip(plain, drafted, again, strict=True):
        assert_right(layer.weights, first)
        for other in others:
            assert torch.equal(first.outputs, other.outputs)
            assert torch.equal(layer.state_of(first), layer.state_of(other))


def _in_pieces(layer: Layer, sequences: list[Sequenced], random: Random) -> list[Sequenced]:
    """Compute sequences with chunks and drafts of random lengths, together; return them."""
    while any(one.left > 1 for one in sequences):
        decoding = [one for one in sequences if one.position >= one.num_prompt and one.left > 1]
        rows = [one.drafted(random, keep=1) for one in random.sample(decoding, len(decoding))]
        rows += [
            Row(one, min(left, 64 * random.randint(1, 4)))
            for one in sequences
            if (left := one.num_prompt - one.position) > 0 and random.random() < 0.5
        ]
        if rows:
            layer.step(rows, num_padded=random.randint(0, 2))
    layer.step([Row(one, 1, 1) for one in sequences])
    return sequences
