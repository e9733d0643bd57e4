"""`launch models`, with caches and machines of a test."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from penstock.launch.extras import models as module
from penstock.launch.extras.models import Machine, describe
from penstock.protocol.config import Config
from tests.launch.conftest import Launch
from tests.models.published import PUBLISHED

DEMO = Config().model_folder
GIB = 2**30


def write(folder: Path, name: str) -> Path:
    """Write the configuration of a published model, with weights that nobody reads."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name].config))
    (folder / "model.safetensors").touch()
    return folder


def listed(launch: Launch, *words: str) -> list[dict[str, Any]]:
    return list(json.loads(launch("models", *words, "--json").out)["models"])


def test_the_cache_and_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "physical_gpus", list)
    assert "no model in the cache: `launch all --model Qwen/Qwen3-0.6B` d" in launch("models").out
    shutil.copytree(DEMO, tmp_path / "models--me--demo" / "snapshots" / "1")
    write(tmp_path / "models--Qwen--Qwen3-8B-MLX-4bit" / "snapshots" / "1", "Qwen3-8B-MLX-4bit")
    half = write(tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / "1", "Qwen3-4B")
    (half / "model.safetensors").unlink()
    part, mlx, demo = listed(launch)
    assert (part["model"], mlx["model"]) == ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B-MLX-4bit")
    assert "model.safetensors is not downloaded" in part["refusal"]
    assert "4-bit MLX" in mlx["refusal"]
    assert (demo["model"], demo["fits"], demo["dtype"]) == ("me/demo", True, "float32")
    lines = launch("models").out.splitlines()
    assert lines[0].startswith("no GPU, RAM of ")
    for start in ("me/demo  15.3 MiB", "Qwen/Qwen3-8B-MLX-4bit: quantization_config: got 4"):
        assert any(line.startswith(start) for line in lines)


def test_damaged_files_do_not_fit(tmp_path: Path, launch: Launch) -> None:
    cut, bare = shutil.copytree(DEMO, tmp_path / "cut"), shutil.copytree(DEMO, tmp_path / "bare")
    os.truncate(cut / "model.safetensors", 1_000_000)
    (bare / "model.safetensors").unlink()
    found = listed(launch, str(DEMO), str(cut), str(bare))
    assert [one["fits"] for one in found] == [True, False, False]
    assert "incomplete metadata, file not fully covered; download it" in found[1]["refusal"]
    assert found[2]["refusal"] == f"{bare} has no model.safetensors; a checkpoint needs it"


def test_a_cache_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    def forbidden(path: Path, _: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "glob", forbidden)
    said = launch("models", code=2).err
    assert f"{tmp_path} can't be read: Permission denied; HF_HOME" in said


@pytest.mark.parametrize(("gpus", "counted"), [([22 * GIB], True), ([], False)])
def test_the_layer_that_drafts_on_gpus_is_counted(gpus: list[int], counted: bool) -> None:
    folder, machine = Config(model="demo-hybrid").model_folder, Machine(gpus, 64 * GIB)
    by_default, without = (
        describe("demo", folder, config, machine).weight_bytes
        for config in (Config(), Config(speculative_method="none"))
    )
    assert (by_default > without) == counted


@pytest.mark.parametrize(
    ("name", "machine", "options", "tp"),
    [
        ("Qwen3-8B", Machine([22 * GIB], 0), {}, 0),
        ("Qwen3-8B", Machine([32 * GIB], 0), {}, 1),
        ("Qwen3-8B", Machine([22 * GIB], 0), {"quantization": "fp8"}, 1),
        ("Qwen3-8B", Machine([22 * GIB] * 2, 0), {}, 2),
        ("Qwen3-32B", Machine([22 * GIB] * 3, 0), {}, 0),
        ("Qwen3-32B", Machine([22 * GIB] * 4, 0), {}, 4),
        ("Qwen3-8B", Machine([], 64 * GIB), {}, 1),
        ("Qwen3-8B", Machine([], 32 * GIB), {}, 0),
        ("Qwen3-8B", Machine([], 40 * GIB), {}, 0),
        ("Qwen3-8B", Machine([], 40 * GIB), {"quantization": "int8"}, 1),
        ("Qwen3-8B", Machine([], 32 * GIB), {"quantization": "int4"}, 0),
    ],
)
def test_the_smallest_group_that_fits(
    tmp_path: Path, name: str, machine: Machine, options: dict[str, str], tp: int
) -> None:
    """tp: 0 where it does not fit."""
    folder = write(tmp_path / "model", name)
    config = Config(**options)  # type: ignore[arg-type]
    found = describe(name, folder, config, machine)
    assert found.fits == bool(tp)
    assert found.fits == (found.needed_bytes <= found.available_bytes)
    assert found.fits == (found.max_tokens >= 32_768)
    if tp:
        assert found.tp == tp


@pytest.mark.parametrize(
    ("name", "gpus"), [("Qwen3-8B", [80 * GIB]), ("Qwen3-4B-AWQ", [])], ids=str
)
def test_integers_that_no_worker_makes_are_refused(
    tmp_path: Path, name: str, gpus: list[int]
) -> None:
    folder = write(tmp_path / "model", name)
    found = describe(name, folder, Config(quantization="int8"), Machine(gpus, 64 * GIB))
    assert found.refusal.startswith("quantization: got int8")
