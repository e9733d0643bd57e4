"""Checks of options against the GPUs of a machine, before any process starts."""

from pathlib import Path
from typing import Any

import pytest

from penstock.launch.commands import gpus
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_of_kv_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    config = Config(kv_offload_gib=0.1, kv_offload_folder=str(tmp_path / "tier"))
    gpus.check_tiers(config)
    (tmp_path / "tier").mkdir()
    gpus.check_tiers(config)
    (tmp_path / "tier").chmod(mode)
    expected = f"--kv-offload-folder: .*tier has mode {mode:o}, so that others may write, expected "
    with pytest.raises(LaunchError, match=expected):
        gpus.check_tiers(config)


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
