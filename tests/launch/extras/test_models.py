"""`launch models`, with caches and machines of a test."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.launch.commands.cli import main
from penstock.launch.extras import models as module
from penstock.launch.extras.models import Machine, describe
from penstock.protocol.config import Config
from tests.models.published import PUBLISHED

DEMO = Config().model_folder
GIB = 2**30


def run(monkeypatch: pytest.MonkeyPatch, *words: str, code: int = 0) -> None:
    """Run `launch models`."""
    monkeypatch.setattr("sys.argv", ["launch", "models", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == code


def write(folder: Path, name: str) -> Path:
    """Write the configuration of a published model, with weights that nobody reads."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name].config))
    (folder / "model.safetensors").touch()
    return folder


def test_the_cache_and_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "physical_gpus", list)
    run(monkeypatch)
    assert (
        "no model in the cache: `launch all --model Qwen/Qwen3-0.6B` d" in capsys.readouterr().out
    )
    shutil.copytree(DEMO, tmp_path / "models--me--demo" / "snapshots" / "1")
    write(tmp_path / "models--Qwen--Qwen3-8B-MLX-4bit" / "snapshots" / "1", "Qwen3-8B-MLX-4bit")
    half = write(tmp_path / "models--Qwen--Qwen3-4B" / "snapshots" / "1", "Qwen3-4B")
    (half / "model.safetensors").unlink()
    run(monkeypatch, "--json")
    listed = {one["model"]: one for one in json.loads(capsys.readouterr().out)["models"]}
    assert list(listed) == ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B-MLX-4bit", "me/demo"]
    assert "model.safetensors is not downloaded" in listed["Qwen/Qwen3-4B"]["refusal"]
    assert "4-bit MLX" in listed["Qwen/Qwen3-8B-MLX-4bit"]["refusal"]
    assert (listed["me/demo"]["fits"], listed["me/demo"]["dtype"]) == (True, "float32")
    run(monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no GPU, RAM of ")
    assert any(line.startswith("me/demo  15.3 MiB") for line in lines)
    assert any(
        line.startswith("Qwen/Qwen3-8B-MLX-4bit: quantization_config: got 4") for line in lines
    )


def test_damaged_files_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut, bare = shutil.copytree(DEMO, tmp_path / "cut"), shutil.copytree(DEMO, tmp_path / "bare")
    os.truncate(cut / "model.safetensors", 1_000_000)
    (bare / "model.safetensors").unlink()
    run(monkeypatch, str(DEMO), str(cut), str(bare), "--json")
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [one["fits"] for one in listed] == [True, False, False]
    assert "incomplete metadata, file not fully covered; download it" in listed[1]["refusal"]
    assert listed[2]["refusal"] == f"{bare} has no model.safetensors; a checkpoint needs it"


def test_a_cache_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(path: Path, _: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(Path, "glob", forbidden)
    run(monkeypatch, code=2)
    assert f"{tmp_path} can't be read: Permission denied; HF_HOME" in capsys.readouterr().err


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
    listed = describe(name, folder, config, machine)
    assert listed.fits == bool(tp)
    assert listed.fits == (listed.needed_bytes <= listed.available_bytes)
    assert listed.fits == (listed.max_tokens >= 32_768)
    if tp:
        assert listed.tp == tp


@pytest.mark.parametrize(
    ("name", "gpus"), [("Qwen3-8B", [80 * GIB]), ("Qwen3-4B-AWQ", [])], ids=str
)
def test_integers_that_no_worker_makes_are_refused(
    tmp_path: Path, name: str, gpus: list[int]
) -> None:
    folder = write(tmp_path / "model", name)
    listed = describe(name, folder, Config(quantization="int8"), Machine(gpus, 64 * GIB))
    assert listed.refusal.startswith("quantization: got int8")
