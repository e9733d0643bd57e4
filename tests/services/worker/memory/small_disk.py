"""Tests of the folder of KV blocks on a disk that is full or read-only.

Run in a mount namespace of its own: `unshare -rm python -m
tests.services.worker.memory.small_disk TEST FOLDER`, by test_small_disk.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.services.worker.memory.folder_tier import SLOT_BYTES, A, B, C, Tier, files, stored

PAGE = 4096
D = bytes([3]) * 32


def mount(path: Path, *options: str) -> None:
    options = "mode=700", *options
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", path], check=True)


def full(path: Path) -> None:
    """Replace the oldest file by the next one."""
    mount(path, f"size={2 * (SLOT_BYTES + PAGE)}")
    tier = stored(path, A, B)
    tier.store(C, 2)
    tier.wait_for("added", C)
    assert len(files(path)) == 2
    assert set(tier.reports["removed"]) < {A, B}
    assert files(path).keys() | set(tier.reports["removed"]) == {A, B, C}
    tier.fetch(C, 3)
    tier.wait_for("fetched", C)
    assert (tier.slots[3] == tier.slots[2]).all()


def full_of_others(path: Path) -> None:
    """Write blocks as soon as others make room."""
    mount(path, f"size={SLOT_BYTES + PAGE}")
    other = path / "other"
    with other.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SLOT_BYTES + PAGE)
    tier = Tier(path)
    tier.store(A, 0)
    tier.errors.get(timeout=60)
    assert not files(path)
    other.unlink()
    tier.store(B, 1)
    tier.wait_for("added", B)


def read_only(path: Path) -> None:
    """Find and read files, and write them as soon as the disk permits it."""
    mount(path, "size=1m")
    tier = stored(path, A, B)
    partial = files(path)[A].with_suffix(".old.partial")
    partial.write_text("")
    os.utime(partial, (0, 0))
    subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
    again = Tier(path)
    again.wait_for("added", A, B)
    again.fetch(B, 3)
    again.wait_for("fetched", B)
    assert (again.slots[3] == tier.old[1]).all()
    fewer = Tier(path, num_files=1)
    fewer.wait_for("added", A, B)
    fewer.store(C, 2)
    for slot, hash_ in enumerate((A, B)):
        fewer.fetch(hash_, slot)
    fewer.wait_for("fetched", A, B)
    assert partial.exists()
    subprocess.run(["mount", "-o", "remount,bind,rw", path], check=True)
    again.store(D, 0)
    again.wait_for("added", D)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
