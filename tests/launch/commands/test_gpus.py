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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_offload_folder": "x"}, "-folder: got 'x' without --kv-offload-gib, expected both"),
        ({"kv_offload_gib": 1, "enable_prefix_caching": False}, "-gib: got 1 with --no-enable-p"),
        ({"kv_offload_gib": 0.6e6, "tp": 2}, "-gib: got 600000 for each of 2 workers, expected l"),
        ({"kv_offload_gib": 3, "dp": 2}, "-gib: got 3 for each of 2 workers, expected less than 2"),
        ({"kv_offload_gib": 1.9, "dp": 2}, ""),
        ({"kv_offload_gib": 0.6e6, "backend": "ray"}, ""),
    ],
)
def test_the_tiers_have_room_and_what_they_need(
    options: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers share the memory of the machine."""
    monkeypatch.setattr(gpus, "_available_bytes", lambda: 4 * 2**30)
    config = Config(**options)
    if not sentence:
        gpus.check_tiers(config)
        return
    with pytest.raises(LaunchError, match=f"--kv-offload{sentence}"):
        gpus.check_tiers(config)
