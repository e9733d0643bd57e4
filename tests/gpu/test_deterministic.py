"""`--deterministic`: the bits of a sequence's logits depend on the sequence alone."""

from pathlib import Path
from typing import Any

import pytest

from penstock.models.random_checkpoint import make_checkpoint, shape_of
from penstock.protocol.checkpoint import ModelError
from tests.gpu.determinism import ways, with_extras

pytestmark = pytest.mark.gpu
BATCHES = [1, 3, 17, 64, 200]
SHAPES = {"0.6B": {"num_hidden_layers": 4}, "30B-A3B": {"num_hidden_layers": 2}}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model of few layers, dense or a mixture of experts."""
    path = tmp_path_factory.mktemp("random")
    make_checkpoint(path, shape_of(request.param) | SHAPES[request.param])
    return path


def test_logits_depend_on_their_sequence_alone(folder: Path) -> None:
    """In batches, chunks, with cached prefixes, preempted, with and without graphs."""
    options = {"model": str(folder), "device": "cuda", "deterministic": True}
    alone = None
    for name, result in ways(options, 200, BATCHES):
        alone = alone or result
        assert len(alone.digests) == 200 * 8
        assert result.num_different(alone) == 0, name


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_what_is_refused(folder: Path, options: dict[str, Any]) -> None:
    """Rather than other bits: on an H200, these depended on the number of rows."""
    options = {"model": str(folder), "device": "cuda", "deterministic": True, **options}
    with pytest.raises(ModelError, match="--deterministic"):
        next(ways(options, 1, [1]))


def test_penalties_and_logprobs_depend_on_their_sequence_alone(folder: Path) -> None:
    options = {"model": str(folder), "device": "cuda", "deterministic": True}
    alone, *others = with_extras(options, 64)
    assert [one.num_different(alone) for one in others] == [0, 0]


def test_the_fast_path_differs(folder: Path) -> None:
    """Otherwise the test before could not fail."""
    options = {"model": str(folder), "device": "cuda"}
    (_, alone), (_, together) = [*ways(options, 64, [1, 64])][:2]
    assert together.num_different(alone) > 0
