"""A model with recurrent state on a GPU, with --deterministic: the same tokens in every way."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.models.hybrid import EXPERTS, save_hybrid
from tests.models.toy.family import registered
from tests.models.toy.model import save_checkpoint
from tests.models.toy.test_state import engine_of, outputs, scarce_engine

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
OPTIONS = {"device": "cuda", "deterministic": True, "enable_cuda_graphs": False, "block_size": 128}


@pytest.fixture(scope="module", autouse=True)
def families() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_the_tokens_of_a_plain_run_of_qwen3_5(tmp_path: Path, experts: dict[str, int]) -> None:
    shape = {"hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    save_hybrid(tmp_path, head_dim=256, **shape, **experts)
    random = Random(1)
    shared = [random.randrange(1, 264) for _ in range(300)]
    prompts = [shared[:n] for n in (1, 127, 128, 129, 300)]
    prompts += [[*shared[:150], *shared[:20] * 3], shared[:20] * 5]
    expected = outputs(engine_of(tmp_path, enable_prefix_caching=False, **OPTIONS), prompts)
    scarce = {"speculative_method": "ngram", "max_num_batched_tokens": 140}
    engine = engine_of(tmp_path, num_blocks=8, max_num_seqs=6, **OPTIONS | scarce)
    for _ in range(2):
        assert outputs(engine, prompts) == expected
    for more in (0, 5):
        engine = scarce_engine(tmp_path, prompts, more, **OPTIONS | scarce)
        for _ in range(2):
            assert outputs(engine, prompts) == expected


@pytest.mark.gpu
def test_the_tokens_of_a_plain_run(tmp_path: Path) -> None:
    folder, random = save_checkpoint(tmp_path / "toy", **SHAPE), Random(1)
    shared = [random.randrange(1, 264) for _ in range(300)]
    prompts = [shared[:n] for n in (1, 127, 128, 129, 300)]
    prompts += [[*shared[:150], *shared[:20] * 3], shared[:20] * 5]
    expected = outputs(engine_of(folder, enable_prefix_caching=False, **OPTIONS), prompts)
    drafts = {"speculative_method": "ngram", "num_blocks": 8}
    engine = engine_of(folder, max_num_seqs=6, max_num_batched_tokens=140, **OPTIONS | drafts)
    for _ in range(2):
        assert outputs(engine, prompts) == expected
    assert engine.scheduler.draft_scheduler.num_accepted_tokens
