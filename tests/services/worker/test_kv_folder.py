"""KV blocks in real files: written, found again, damaged, too many, and on disks that fail."""

import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.services.worker import kv_folder
from penstock.services.worker.kv_files import KvFiles
from penstock.services.worker.kv_folder import KvFolder

SLOT_BYTES = 8192
NUM_SLOTS = 4
DIGEST = bytes(range(32))
A, B, C = (bytes([n]) * 32 for n in range(3))


class Tier:
    """A folder with its slots, and what it has reported."""

    def __init__(self, path: Path, digest: bytes = DIGEST, num_files: float = 100) -> None:
        self.slots = np.random.default_rng(1).integers(0, 256, (NUM_SLOTS, SLOT_BYTES), np.uint8)
        self.old = self.slots.copy()
        file_bytes = SLOT_BYTES + 88
        self.folder = KvFolder(path, digest, num_files * file_bytes, self.slots)
        self.reports: dict[str, list[bytes]] = {}
        self._news = threading.Condition()
        self.folder.notify = self._notify
        self.folder.start()

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    def wait_for(self, kind: str, *hashes: bytes) -> None:
        """Wait until these hashes are reported."""

        def are_there() -> bool:
            if report := self.folder.take_report():
                for name in ("added", "removed", "fetched", "failed"):
                    self.reports.setdefault(name, []).extend(getattr(report, name))
            return set(hashes) <= set(self.reports.get(kind, []))

        with self._news:
            assert self._news.wait_for(are_there, 30), self.reports

    def store(self, hash_: bytes, slot: int, wait: Callable[[], object] = int) -> None:
        self.folder.overwrite([slot])
        self.folder.store([hash_], [slot], wait)

    def fetch(self, hash_: bytes, slot: int) -> None:
        self.folder.fetch([hash_], [slot], int)


def files(path: Path) -> dict[bytes, Path]:
    return {bytes.fromhex(one.name): one for one in path.glob("*/??/*") if len(one.name) == 64}


def stored(path: Path, *hashes: bytes) -> Tier:
    """Return a tier that has written its first slots."""
    tier = Tier(path)
    for slot, hash_ in enumerate(hashes):
        tier.store(hash_, slot)
    tier.wait_for("added", *hashes)
    return tier


def test_another_process_finds_the_files(tmp_path: Path) -> None:
    old = stored(tmp_path, A, B).old
    tier = Tier(tmp_path)
    tier.wait_for("added", A, B)
    tier.fetch(B, 3)
    tier.wait_for("fetched", B)
    assert (tier.slots[3] == old[1]).all()
    assert (tier.slots[:3] == old[:3]).all()


@pytest.mark.parametrize("place", [0, 8, 40, 72, 88, 88 + SLOT_BYTES - 1])
def test_a_flipped_bit_is_noticed(tmp_path: Path, place: int) -> None:
    """The bit may be in any part of the file."""
    tier = stored(tmp_path, A, B)
    path = files(tmp_path)[A]
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)
    tier.fetch(A, 2)
    tier.wait_for("failed", A)
    assert (tier.slots == tier.old).all()
    assert set(files(tmp_path)) == {B}


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b"\0", lambda _: b""]
)
def test_a_file_of_another_size_is_noticed(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    tier = stored(tmp_path, A)
    path = files(tmp_path)[A]
    path.write_bytes(change(path.read_bytes()))
    tier.fetch(A, 2)
    tier.wait_for("failed", A)
    assert (tier.slots == tier.old).all()


def test_a_file_with_another_name_is_noticed(tmp_path: Path) -> None:
    tier = stored(tmp_path, A, B)
    files(tmp_path)[A].rename(files(tmp_path)[B])
    tier.fetch(B, 2)
    tier.wait_for("failed", B)
    assert (tier.slots == tier.old).all()


def test_files_of_another_model_are_not_used(tmp_path: Path) -> None:
    """Neither those in its folder, nor those that somebody moves."""
    stored(tmp_path, A, B)
    other = Tier(tmp_path, digest=bytes(32))
    other.store(C, 0)
    other.wait_for("added", C)
    assert other.reports["added"] == [C]
    source, folder = files(tmp_path)[A], files(tmp_path)[C].parents[1]
    (folder / source.parent.name).mkdir(exist_ok=True)
    source.rename(folder / source.parent.name / source.name)
    other.fetch(A, 1)
    other.wait_for("failed", A)
    assert (other.slots == other.old).all()


def test_a_slot_that_is_overwritten_is_not_written_to_a_file(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    begun, go_ahead = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_ahead.wait(30)

    tier.store(A, 0, wait)
    assert begun.wait(30)
    tier.folder.overwrite([0])
    go_ahead.set()
    for slot, hash_ in enumerate((B, C)):  # each writer has written one after the other
        tier.store(hash_, 1 + slot)
    tier.wait_for("added", B, C)
    assert A not in files(tmp_path)


def test_the_oldest_files_are_removed(tmp_path: Path) -> None:
    tier = Tier(tmp_path, num_files=2)
    for slot, hash_ in enumerate((A, B)):
        tier.store(hash_, slot)
        tier.wait_for("added", hash_)
    tier.fetch(A, 3)
    tier.wait_for("fetched", A)
    tier.store(C, 2)
    tier.wait_for("removed", B)
    assert set(files(tmp_path)) == {A, C}


def test_content_that_may_be_wrong_is_removed(tmp_path: Path) -> None:
    tier = stored(tmp_path, A, B)
    tier.folder.remove([A])
    tier.fetch(A, 2)
    tier.wait_for("failed", A)
    tier.fetch(B, 2)
    tier.wait_for("fetched", B)


def test_a_disk_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_folder, "MAX_FETCH_SECONDS", 0.0)
    tier = stored(tmp_path, A)
    answers, read = threading.Event(), tier.folder._disk.read

    def read_late(hash_: bytes, buffer: bytearray) -> memoryview:
        assert answers.wait(30)
        return read(hash_, buffer)

    monkeypatch.setattr(tier.folder._disk, "read", read_late)
    tier.fetch(A, 2)
    tier.folder.check_time()
    tier.wait_for("failed", A)
    assert "its files are not used any more" in caplog.text
    tier.fetch(A, 2)
    tier.folder.restart()  # does not wait for the disk
    tier.wait_for("added", A)
    answers.set()
    assert (tier.slots == tier.old).all()


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


@pytest.mark.parametrize("change", [become_fifo, become_folder, become_endless, lose_parent])
def test_other_things_in_place_of_a_file_are_no_hit_and_change_nothing_else(
    tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    tier = stored(tmp_path, A, B)
    change(files(tmp_path)[A])
    tier.fetch(A, 2)
    tier.wait_for("failed", A)
    assert "more than" not in caplog.text
    assert (tier.slots == tier.old).all()
    tier.store(A, 0)
    tier.store(C, 1)
    tier.wait_for("added", C)
    tier.fetch(B, 3)
    tier.wait_for("fetched", B)
    assert tier.folder.writes
    again = Tier(tmp_path)
    again.wait_for("added", B, C)


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
    assert tier.folder.writes
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
    assert is_removed.wait(30)
    assert set(files(tmp_path)) == {B}


def test_processes_of_one_pid_may_write_the_same_file(tmp_path: Path) -> None:
    """As in containers that share the folder: each writes to a file of its own first."""
    files_ = [KvFiles(tmp_path, DIGEST, SLOT_BYTES) for _ in range(2)]
    content = bytes(SLOT_BYTES)

    def other_is_faster() -> bool:
        return files_[1].write(A, content, lambda: True)

    assert files_[0].write(A, content, other_is_faster)
    assert bytes(files_[0].read(A, bytearray(files_[0].file_bytes))) == content


def test_a_disk_that_is_full_stops_writing_and_not_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = stored(tmp_path, A)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES // 2, limits[1]))
    failed = threading.Event()
    tier.folder.notify = failed.set
    try:
        tier.store(B, 1)
        assert failed.wait(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("no more KV blocks are written") == 1
    assert [path for path in tmp_path.glob("*/??/*") if path.is_file()] == [files(tmp_path)[A]]
    tier.folder.notify = tier._notify
    tier.store(C, 2)
    tier.fetch(A, 3)
    tier.wait_for("fetched", A)
    assert set(files(tmp_path)) == {A}


def test_a_folder_that_cannot_be_made_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    tier = Tier(path)
    tier.store(A, 0)
    tier.fetch(A, 1)
    tier.wait_for("failed", A)
    assert "none are written" in caplog.text
