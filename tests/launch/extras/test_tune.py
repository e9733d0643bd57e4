"""`launch tune` without a GPU: what it would measure, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.bench import linear as program
from penstock.launch.extras import tune
from penstock.launch.extras.tune import layer_options
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config
from tests.launch.conftest import Launch
from tests.models.published import PUBLISHED


@pytest.mark.parametrize(
    ("name", "tp", "layer", "dtype"),
    [
        ("Qwen3-8B", 1, [4096, 12288, 32, 8], "bfloat16"),
        ("Qwen3-8B", 2, [4096, 6144, 16, 4], "bfloat16"),
        ("Qwen3-8B-FP8", 1, [4096, 12288, 32, 8], "fp8"),
        ("Qwen3-30B-A3B", 8, [2048, 768, 4, 1], "bfloat16"),
    ],
)
def test_the_products_of_a_rank(
    name: str, tp: int, layer: list[int], dtype: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].config))
    options = layer_options(read_model_config(tmp_path), tp)
    monkeypatch.setattr("sys.argv", ["linear", "--cache", *options])
    parsed = program._arguments()
    assert (parsed.layer, parsed.tp, parsed.dtype, parsed.cache) == (layer, tp, dtype, True)


def test_refuses_other_heads() -> None:
    with pytest.raises(LaunchError, match="tune: got a model with heads of 64, expected 128"):
        layer_options(read_model_config(Config().model_folder), 1)


def test_refuses_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, launch: Launch) -> None:
    monkeypatch.setattr(tune, "num_gpus", lambda: 0)
    assert "tune: got a machine without an NVIDIA GPU" in launch("tune", code=2).err
