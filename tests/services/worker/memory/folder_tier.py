"""A folder of KV blocks with real files, its slots and its reports."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import numpy as np

from penstock.services.worker.memory.kv_folder import KvFolder

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
        self.errors: Queue[OSError] = Queue()
        """that the folder has handled"""
        self._warn_once = self.folder._warn_once
        self.folder._warn_once = self._note  # type: ignore[method-assign]
        self.folder.notify = self._notify
        self.folder.start()
        with self._news:  # later, it could report a file that a test has stored for a second time
            assert self._news.wait_for(lambda: self.folder._is_listed, 60)

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    def _note(self, error: OSError) -> None:
        self._warn_once(error)
        self.errors.put(error)

    def wait_for(self, kind: str, *hashes: bytes) -> None:
        """Wait until these hashes are reported."""

        def are_there() -> bool:
            while report := self.folder.take_report():
                for name in ("added", "removed", "fetched", "failed", "unwritten"):
                    self.reports.setdefault(name, []).extend(getattr(report, name))
            return set(hashes) <= set(self.reports.get(kind, []))

        with self._news:
            assert self._news.wait_for(are_there, 60), self.reports

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
