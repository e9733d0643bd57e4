"""The folder that processes of one node share."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from penstock.launch.ray.nodes import LOCK_FILE, NodeFolder


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"penstock-{os.getuid()}" / ".ray"


def test_the_last_one_removes_it(parent: Path) -> None:
    first, second = NodeFolder("a"), NodeFolder("a")
    assert first.path == second.path == parent / "a"
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert first.write("config.json", b"1").parent == first.path
    written = first.write("keys/deep/server.key", b"1")
    assert written.read_bytes() == b"1"
    assert written.stat().st_mode & 0o777 == 0o600
    for folder in (written.parent, written.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    first.leave()
    assert written.exists()
    second.leave()
    assert list(parent.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        second.write("keys/server.key", b"2")
    assert list(parent.iterdir()) == []


def test_what_is_left_of_others_is_removed(parent: Path) -> None:
    alive, dead = NodeFolder("alive"), NodeFolder("dead")
    dead.write("config.json", b"1")
    os.close(dead._lock)  # as the kernel does at its end
    (parent / "killed before its lock was there").mkdir()
    NodeFolder("b").leave()
    assert list(parent.iterdir()) == [alive.path]


def test_a_folder_that_is_just_being_removed_is_made_again(parent: Path) -> None:
    """Its lock is of a file that is no longer there."""
    parent.mkdir(parents=True)
    first = NodeFolder("a")
    held = os.open(first.path / LOCK_FILE, os.O_RDWR)
    (first.path / LOCK_FILE).unlink()
    again = NodeFolder("a")
    fcntl.flock(held, fcntl.LOCK_SH)
    assert os.fstat(again._lock).st_ino == (again.path / LOCK_FILE).stat().st_ino


def test_a_folder_of_another_user_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    (parent.parent.parent / f"penstock-{uid + 1}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {uid}"):
        NodeFolder("a")


def test_a_link_to_another_folder_is_refused(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    parent.parent.symlink_to(tmp_path / "other")
    with pytest.raises(PermissionError, match="is a symbolic link"):
        NodeFolder("a")
    assert not list((tmp_path / "other").iterdir())
