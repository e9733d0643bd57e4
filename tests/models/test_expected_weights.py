"""Names and shapes that a configuration demands are those that transformers writes."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.checkpoint_files import check_tensors
from penstock.protocol.expected_weights import expected_weights
from tests.models.checkpoints import EXPERTS, save_checkpoint, save_embedding_model

SHAPES: list[dict[str, Any]] = [{}, {"tie_word_embeddings": True}, EXPERTS]


def written(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("shape", SHAPES)
def test_of_models_that_generate(tmp_path: Path, shape: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **shape)
    config = read_model_config(tmp_path)
    assert {one.name: one.shape for one in expected_weights(config)} == written(tmp_path)
    check_tensors(tmp_path, config)


def test_of_an_embedding_model(tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    config = read_model_config(tmp_path)
    expected = {one.name.removeprefix("model."): one.shape for one in expected_weights(config)}
    assert expected == written(tmp_path)
    check_tensors(tmp_path, config)
