"""The run folder of one pipeline on one node, which its processes there share."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from penstock.protocol.run_folder import make_own_folder

LOCK_FILE = "lock"


class NodeFolder:
    """Made by the first process of a node that enters it, removed with the last one that leaves.

    Each holds a shared lock on it, which the kernel drops when its holder dies: who could have the
    folder alone removes it, also what a pipeline that was killed has left there.
    """

    def __init__(self, run: str) -> None:
        """run: of the pipeline and the node, one that no other has."""
        # a name that no pipeline can have
        parent = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" / ".ray"
        for path in (parent.parent, parent):
            make_own_folder(path)
        for left in parent.iterdir():
            _remove_if_left(left)
        self.path = parent / run
        self._lock = _enter(self.path)

    def leave(self) -> None:
        _remove_if_left(self.path, self._lock)

    def write(self, path: str, content: bytes) -> Path:
        """Write a file for this user only; readers see the old or the new content.

        Raises FileNotFoundError after `leave`: nobody would remove the folder again.
        """
        target = self.path / path
        for parent in reversed(Path(path).parents[:-1]):  # the last one is the folder itself
            (self.path / parent).mkdir(mode=0o700, exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return Path(new).rename(target)


def _enter(folder: Path) -> int:
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = _open(folder)
    except FileNotFoundError:  # it was removed in this moment
        return _enter(folder)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if (folder / LOCK_FILE).exists() and os.path.samestat(
        os.fstat(lock), (folder / LOCK_FILE).stat()
    ):
        return lock
    os.close(lock)
    return _enter(folder)


def _open(folder: Path) -> int:
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)


def _remove_if_left(folder: Path, lock: int | None = None) -> None:
    """With nobody in it but the holder of `lock`, which is let go of."""
    try:
        lock = _open(folder) if lock is None else lock
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)
