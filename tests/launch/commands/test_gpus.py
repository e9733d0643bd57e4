"""Checks of options against the GPUs of a machine, before any process starts."""

from typing import Any

import pytest

from penstock.launch.commands import gpus
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config


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
