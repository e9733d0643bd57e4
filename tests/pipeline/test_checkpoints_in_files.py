"""A conversation with a hybrid model continues after `launch stop`: its state comes from files."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.models.hybrid import save_hybrid
from tests.models.toy.test_state import plain
from tests.pipeline.conftest import Pipeline

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"),
]
NUM_OUT = 30
UNIT = 64
"""tokens between the positions of checkpoints"""
SAMPLING = {"temperature": 0.0, "max_tokens": NUM_OUT, "ignore_eos": True}


def start(pipeline: Callable[..., Pipeline], folder: Path, files: Path) -> Pipeline:
    options = ["--block-size", "16", "--kv-offload-gib", "0.1", "--kv-offload-folder", str(files)]
    return pipeline("--model", str(folder), *options)


def stop(served: Pipeline) -> None:
    assert served.run("stop").returncode == 0
    assert served.wait() == 0


def test_the_next_turn_after_a_stop_begins_at_the_last_checkpoint(
    pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    folder, files, random = tmp_path / "model", tmp_path / "files", Random(5)
    folder.mkdir()
    save_hybrid(folder)
    served = start(pipeline, folder, files)
    prompts: list[list[int]] = []
    token_ids: list[int] = []
    for length in (300, 40, 90, 70):
        token_ids += [random.randrange(1, 264) for _ in range(length)]
        prompts.append(list(token_ids))
        with served.client() as client:
            result = client.generate(token_ids, **SAMPLING)
        cached = (len(prompts[-2]) - 1) // UNIT * UNIT if len(prompts) > 1 else 0
        assert result.usage.cached_tokens == cached
        token_ids += result.token_ids
    stop(served)

    served = start(pipeline, folder, files)
    token_ids += [random.randrange(1, 264) for _ in range(50)]
    with served.client() as client:
        result = client.generate(token_ids, **SAMPLING)
    assert result.usage.cached_tokens == (len(prompts[-1]) - 1) // UNIT * UNIT
    assert [result.token_ids] == plain(folder, [token_ids], NUM_OUT)
    stop(served)
