"""Checks of options against the GPUs of a machine, before any process starts."""

from typing import Any

import pytest

from penstock.launch.commands import gpus
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config


@pytest.mark.parametrize(
    ("options", "num_gpus", "sentence"),
    [
        ({"dtype": "float16", "device": "cpu"}, 1, "got float16 on a CPU, expected auto or float3"),
        ({"dtype": "bfloat16"}, 0, "got bfloat16 on a CPU, expected auto or float32"),
        ({"dtype": "float32", "device": "cuda"}, 1, "got float32 on a GPU, expected auto, bfloat1"),
        ({"dtype": "float16"}, 1, ""),
        ({"dtype": "float16"}, None, ""),
        ({"dtype": "float16", "backend": "ray"}, 0, ""),
        ({"dtype": "float32"}, 0, ""),
        ({}, 0, ""),
    ],
)
def test_the_type_of_computation(
    options: dict[str, Any],
    num_gpus: int | None,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda: num_gpus)
    config = Config(**options)
    if not sentence:
        gpus.check_dtype(config)
        return
    with pytest.raises(LaunchError, match=f"--dtype: {sentence}"):
        gpus.check_dtype(config)
