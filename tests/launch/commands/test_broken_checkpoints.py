"""`launch all` refuses each broken checkpoint with one sentence, before any process starts."""

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.commands import start as module
from penstock.launch.commands.start import start
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import PROCFILE
from penstock.protocol.config import Config
from tests.launch.commands.broken_checkpoints import BROKEN, SERVED

CAPABILITY_VERSION = 0x20080522
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1 << 1, 1 << 2


class StartedError(Exception):
    """A pipeline would run."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def run(*_: Any) -> int:
        raise StartedError

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_supervise", run)
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


@contextlib.contextmanager
def obeying_modes() -> Iterator[None]:
    """Let this thread obey the modes of files, which root's capabilities override.

    It stays the same user, so it can still read what its own user may, wherever that lies.
    """
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, 32 at a time
    libc.capget(header, before)
    fewer = (ctypes.c_uint32 * 6)(*before)
    fewer[0] &= ~(CAP_DAC_OVERRIDE | CAP_DAC_READ_SEARCH)
    assert libc.capset(header, fewer) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        libc.capset(header, before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors"])
def test_without_permission(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may read a file, or the folder."""
    (folder / name).chmod(0)
    monkeypatch.setattr(module, "claim", contextlib.nullcontext)  # the run folder is another test's
    try:
        expected = r"--model: .* can't be read: Permission denied"
        with obeying_modes(), pytest.raises(LaunchError, match=expected):
            begin(folder)
    finally:
        (folder / name).chmod(0o755)
