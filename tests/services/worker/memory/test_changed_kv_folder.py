"""A folder of KV blocks in which others remove and replace files, and whose limit changes."""

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.services.worker.memory.kv_folder import KvFiles, KvFolder
from tests.services.worker.memory.folder_tier import (
    DIGEST,
    SLOT_BYTES,
    A,
    B,
    C,
    Tier,
    files,
    stored,
)


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("")


def become_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def lose_parent(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("a file in place of the folder")


def become_writable(path: Path) -> None:
    path.chmod(0o620)


def become_another_users(path: Path) -> None:
    """Change the owner; nobody but root may, so others change the mode."""
    if os.getuid():
        path.chmod(0o602)
    else:
        os.chown(path, 12345, 12345)


def become_a_link(path: Path) -> None:
    """Put the file elsewhere, where its content can be changed by others."""
    path.symlink_to(path.rename(path.parents[2] / "elsewhere"))


def become_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)


def flip(place: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 16
        path.write_bytes(content)

    return change


def become(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(content(path.read_bytes()))

    return change


def become_anothers(path: Path) -> None:
    """Take the content of the other block."""
    path.write_bytes(files(path.parents[2])[B].read_bytes())


THINGS = (
    *(become_fifo, become_folder, become_endless, become_socket, lose_parent),
    *(become_writable, become_another_users, become_a_link),
)
CONTENTS = (
    become_anothers,
    *map(become, (lambda data: data[:-1], lambda data: data + b"\0", lambda _: b"")),
    *map(flip, (0, 8, 40, 72, 88, 88 + SLOT_BYTES - 1)),
)


@pytest.mark.parametrize("change", THINGS + CONTENTS)
def test_other_things_in_place_of_a_file_are_no_hit_and_change_nothing_else(
    tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    tier = stored(tmp_path, A, B)
    change(files(tmp_path)[A])
    tier.fetch(A, 2)
    tier.wait_for("failed", A)
    assert "more than" not in caplog.text
    assert (tier.slots == tier.old).all()
    assert change in THINGS or set(files(tmp_path)) == {B}
    tier.store(A, 0)
    tier.store(C, 1)
    tier.wait_for("added", C)
    tier.fetch(B, 3)
    tier.wait_for("fetched", B)
    again = Tier(tmp_path)
    again.wait_for("added", B, C)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("change", [become_writable, become_another_users, become_a_link])
def test_a_folder_that_others_may_change_is_not_used(
    tmp_path: Path, depth: int, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the given folder nor that of this model is."""
    path = tmp_path / "deep" / "tier"
    stored(path, A)
    folder = files(path)[A].parents[depth]
    change(folder)
    tier = Tier(path)
    tier.store(B, 1)
    for error in [tier.errors.get(timeout=60) for _ in ("list", "write")]:
        assert isinstance(error, PermissionError)
        assert f"{folder} " in str(error)
    assert "expected a folder of user" in caplog.text
    assert not tier.reports.get("added")
    folder.chmod(0o700)
    assert B not in files(path)


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    tier = stored(tmp_path, A)
    shutil.rmtree(tmp_path)
    tier.fetch(A, 2)
    tier.wait_for("failed", A)
    tier.reports.clear()
    for slot, hash_ in enumerate((A, B)):
        tier.store(hash_, slot)
    tier.wait_for("added", A, B)
    assert set(files(tmp_path)) == {A, B}


@pytest.mark.parametrize("hours", [-2, 2])
def test_foreign_and_partial_files_are_no_blocks(tmp_path: Path, hours: int) -> None:
    """Partial files are removed unless they are new; the clock may have been set back."""
    stored(tmp_path, A)
    parent = files(tmp_path)[A].parent
    for name in ("z" * 64, "A " * 32, "0" * 64 + ".old.partial", "0" * 64 + ".new.partial"):
        (parent / name).write_text("")
    (parent / ("f" * 64)).mkdir()
    when = time.time() + 3600 * hours
    os.utime(parent / ("0" * 64 + ".old.partial"), (when, when))
    tier = Tier(tmp_path)
    tier.wait_for("added", A)
    assert tier.reports["added"] == [A]
    left = {path.name.lstrip("0") for path in parent.iterdir()}
    assert ".new.partial" in left
    assert ".old.partial" not in left


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    stored(tmp_path, A, B, C)
    for when, hash_ in enumerate((B, C, A)):
        os.utime(files(tmp_path)[hash_], (when, when))
    Tier(tmp_path, num_files=1).wait_for("removed", B, C)
    Tier(tmp_path).wait_for("added", A)


def test_a_removal_is_carried_out_though_the_scheduler_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content that may be wrong must not be found by the next worker."""
    old = stored(tmp_path, A, B)
    folder = KvFolder(tmp_path, DIGEST, 1e9, old.slots)
    is_removed, remove = threading.Event(), folder._disk.remove

    def noted(hash_: bytes) -> None:
        remove(hash_)
        is_removed.set()

    monkeypatch.setattr(folder._disk, "remove", noted)
    folder.remove([A])
    folder.restart()
    folder.start()
    assert is_removed.wait(60)
    assert set(files(tmp_path)) == {B}


def test_a_removal_holds_for_a_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path)
    write, rename = tier.folder._disk.write, Path.rename
    begun, is_removed, has_ended = threading.Event(), threading.Event(), threading.Event()

    def rename_late(path: Path, target: Path) -> Path:
        begun.set()
        assert is_removed.wait(60)
        return rename(path, target)

    def noted(hash_: bytes, content: object, is_right: Callable[[], bool]) -> bool:
        is_written = write(hash_, content, is_right)
        has_ended.set()
        return is_written

    monkeypatch.setattr(Path, "rename", rename_late)
    monkeypatch.setattr(tier.folder._disk, "write", noted)
    tier.store(A, 0)
    assert begun.wait(60)
    tier.folder.remove([A])
    is_removed.set()
    assert has_ended.wait(60)
    assert not files(tmp_path)
    tier.store(B, 1)
    tier.wait_for("added", B)
    assert tier.reports["added"] == [B]


def test_processes_of_one_pid_may_write_the_same_file(tmp_path: Path) -> None:
    """Containers that share the folder may have equal pids; each writes a separate file first."""
    files_ = [KvFiles(tmp_path, DIGEST, SLOT_BYTES) for _ in range(2)]
    content = bytes(SLOT_BYTES)

    def other_is_faster() -> bool:
        return files_[1].write(A, content, lambda: True)

    assert files_[0].write(A, content, other_is_faster)
    assert bytes(files_[0].read(A, bytearray(files_[0].file_bytes))) == content
