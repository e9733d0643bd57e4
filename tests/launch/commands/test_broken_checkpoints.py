"""`launch all` refuses each broken checkpoint with one sentence, before any process starts."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.commands import start as module
from penstock.launch.commands.start import start
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import PROCFILE
from penstock.protocol.config import Config
from tests.launch.commands.broken_checkpoints import BROKEN, SERVED

NOBODY = 65534


class StartedError(Exception):
    """A pipeline would run."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def run(*_: Any) -> int:
        raise StartedError

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_run", run)
    return shutil.copytree(Config().model_folder, tmp_path / "model")


def begin(folder: Path) -> None:
    endpoint = f"ipc://{folder.parent}/clients"
    start(Config(name="x", model=str(folder), endpoint=endpoint, http=0, device="cpu"), PROCFILE, 5)


@pytest.mark.parametrize("name", BROKEN)
def test_broken(folder: Path, name: str) -> None:
    damage, sentence = BROKEN[name]
    damage(folder)
    with pytest.raises(LaunchError) as caught:
        begin(folder)
    said = str(caught.value)
    assert said.startswith("--model: ")
    assert "\n" not in said
    assert sentence in said


@pytest.mark.parametrize("name", SERVED)
def test_served(folder: Path, name: str) -> None:
    SERVED[name](folder)
    with pytest.raises(StartedError):
        begin(folder)


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors"])
def test_without_permission(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, or the folder, belongs to somebody else."""
    (folder / name).chmod(0)
    is_root = os.geteuid() == 0
    monkeypatch.setattr(module, "claim", contextlib.nullcontext)  # the run folder is another test's
    if is_root:
        (folder.parent.parent.parent).chmod(0o711)
        (folder.parent.parent).chmod(0o711)
        folder.parent.chmod(0o777)
        os.seteuid(NOBODY)
    try:
        with pytest.raises(LaunchError, match=r"--model: .* can't be read: Permission denied"):
            begin(folder)
    finally:
        if is_root:
            os.seteuid(0)
        (folder / name).chmod(0o755)
