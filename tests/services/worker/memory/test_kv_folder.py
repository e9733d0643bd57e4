"""KV blocks in real files: written, found again, damaged, too many, and on disks that fail."""

import resource
import threading
from functools import partial
from pathlib import Path

import pytest

from penstock.protocol.messages.worker import FolderReport
from penstock.services.worker.memory import kv_folder
from tests.services.worker.memory.folder_tier import SLOT_BYTES, A, B, C, Tier, files, stored


def test_another_process_finds_the_files(tmp_path: Path) -> None:
    old = stored(tmp_path, A, B).old
    tier = Tier(tmp_path)
    tier.wait_for("added", A, B)
    tier.fetch(B, 3)
    tier.wait_for("fetched", B)
    assert (tier.slots[3] == old[1]).all()
    assert (tier.slots[:3] == old[:3]).all()


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


def test_a_slot_that_is_overwritten_is_not_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_folder, "NUM_WRITERS", 1)  # writes B after A
    tier = Tier(tmp_path)
    begun, go_ahead = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_ahead.wait(60)

    tier.store(A, 0, wait)
    assert begun.wait(60)
    tier.folder.overwrite([0])
    go_ahead.set()
    tier.store(B, 1)
    tier.wait_for("added", B)
    assert set(files(tmp_path)) == {B}
    assert tier.reports["unwritten"] == [A]


def test_every_request_to_write_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is there is reported again, and one that finds no room in the queue as well."""
    monkeypatch.setattr(kv_folder, "NUM_WRITERS", 1)
    tier = stored(tmp_path, A)
    tier.store(A, 1)
    begun, go_ahead = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_ahead.wait(60)

    tier.store(B, 0, wait)
    assert begun.wait(60)
    for slot in range(4):
        tier.store(bytes([9 + slot]) * 32, slot)
    tier.store(C, 0)
    tier.wait_for("unwritten", C)
    assert tier.reports["added"] == [A, A]
    go_ahead.set()


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


def test_a_file_that_is_still_to_be_removed_is_not_read_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_folder, "NUM_WRITERS", 1)  # writes B after A
    monkeypatch.setattr(
        kv_folder, "num_processors", lambda: 2
    )  # one thread waits, another one reads
    tier = stored(tmp_path, A)
    proceed, remove = threading.Event(), tier.folder._disk.remove

    def remove_late(hash_: bytes) -> None:
        assert proceed.wait(60)
        remove(hash_)

    monkeypatch.setattr(tier.folder._disk, "remove", remove_late)
    tier.folder.remove([A])
    tier.fetch(A, 2)
    tier.wait_for("failed", A)
    tier.store(A, 3)  # is dropped: the old file has its name
    tier.store(B, 0)
    tier.wait_for("added", B)
    proceed.set()
    tier.fetch(B, 1)
    tier.wait_for("fetched", B)
    assert tier.reports["added"].count(A) == 1


def test_the_last_report_of_a_list_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_folder, "MAX_REPORTED", 2)
    folder = stored(tmp_path, A, B, C).folder
    assert folder.take_report() is None
    folder.restart()
    reports = [folder.take_report() for _ in range(3)]
    found = [report and (len(report.added), report.is_listed) for report in reports]
    assert found == [(2, False), (1, True), None]
    empty = Tier(tmp_path / "empty").folder
    assert empty.take_report() is None, "no request has asked for the list"
    empty.restart()
    assert empty.take_report() == FolderReport(-1, -1, is_listed=True)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_list_ends_when_it_is_whole_or_takes_too_long(
    is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_folder, "MAX_LIST_SECONDS", 0.0 if is_late else 3600.0)
    folder = stored(tmp_path, A).folder
    folder._is_listed = False  # as if the disk had not answered yet
    folder._files.clear()
    folder.restart()
    notes: list[str] = []
    folder.notify = partial(notes.append, "a report")
    folder.check_time()
    report = folder.take_report()
    assert (bool(notes), report and report.is_listed) == (is_late, is_late or None)
    folder._list()
    listed = folder.take_report()
    assert listed
    assert (listed.added, listed.is_listed) == ([A], not is_late)


def test_a_disk_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_folder, "MAX_FETCH_SECONDS", 0.0)
    tier = stored(tmp_path, A)
    answers, read = threading.Event(), tier.folder._disk.read

    def read_late(hash_: bytes, buffer: bytearray) -> memoryview:
        assert answers.wait(60)
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


def test_what_cannot_be_written_is_left_out_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No file is removed for it: that would not help."""
    tier = stored(tmp_path, A)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES // 2, limits[1]))
    try:
        for slot in (1, 2):
            tier.store(B, slot)
            tier.errors.get(timeout=60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("File too large") == 1
    assert [path for path in tmp_path.glob("*/??/*") if path.is_file()] == [files(tmp_path)[A]]
    tier.fetch(A, 3)
    tier.wait_for("fetched", A)
    tier.store(B, 1)
    tier.wait_for("added", B)
    assert set(files(tmp_path)) == {A, B}


def test_a_folder_that_cannot_be_made_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("")
    tier = Tier(path)
    tier.store(A, 0)
    tier.fetch(A, 1)
    tier.wait_for("failed", A)
    assert "Not a directory" in caplog.text
