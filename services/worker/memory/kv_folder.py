"""The folder tier of the KV cache: blocks in files, named by the hash of their whole prefix.

Threads read and write; the main thread waits for none of them. A file is read as a whole, compared
with its checksum and then copied to its host slot. A disk that fails costs hits and nothing else:
a block that can't be written is left out, and a disk that is too slow is not read again.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.messages.worker import FolderReport
from penstock.protocol.processors import num_processors
from penstock.services.worker.memory.kv_files import FULL, KvFiles

log = logging.getLogger(__name__)
MAX_FETCH_SECONDS = 2.0  # in which a disk must have read all that was requested
NUM_WRITERS = 2
MAX_REPORTED = 10_000  # files in a message
Wait = Callable[[], object]  # returns when the copies that use a slot have ended


class _Transfer(NamedTuple):
    """A block to be written, read or, with a slot below 0, removed."""

    hash: bytes
    slot: int
    # of the slot's content that is written, or of the request to read; a later one cancels it
    number: int
    wait: Wait


class KvFolder:
    """Files of one rank, the one used last last."""

    def __init__(
        self, folder: Path, digest: bytes, max_bytes: float, host: NDArray[np.uint8]
    ) -> None:
        """Use a folder from `start` on.

        digest: 32 bytes, of all that must be equal for a file to be used. host: the slots,
        [num_slots, slot_bytes].
        """
        self._disk = KvFiles(folder, digest, host.shape[1])
        self._host = host
        self.max_files = int(max_bytes / self._disk.file_bytes)
        # called by any thread when `take_report` may have something
        self.notify: Callable[[], object] = int
        self._lock = threading.Condition()
        self._files: OrderedDict[bytes, None] = OrderedDict()
        self._numbers = [0] * len(host)  # of the contents of slots
        self._request = 0  # number of the last fetch; those before are cancelled
        self._num_copying = 0  # threads that write to a slot
        self._pending: set[bytes] = set()  # hashes that are read
        self._deadline = 0.0  # the moment until which they must be
        # hashes of files that must be removed; they are neither read nor replaced before
        self._doomed: set[bytes] = set()
        self._news = FolderReport(-1, -1)  # the next report
        self._is_listed = False
        # kinds of errors, each of which is logged once
        self._logged: set[tuple[type, int | None]] = set()
        self.reads = True
        self._writes: Queue[_Transfer] = Queue(len(host))
        self._fetches: Queue[_Transfer] = Queue()

    # ---- for the main thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, one of which lists the files."""
        self._start(self._list)
        for _ in range(NUM_WRITERS):
            self._start(self._write_all)
        for _ in range(min(8, num_processors())):
            self._start(self._fetch_all)

    def overwrite(self, slots: Iterable[int]) -> None:
        """Note that the content of slots changes from now on."""
        for slot in slots:
            self._numbers[slot] += 1

    def store(self, hashes: Sequence[bytes], slots: Sequence[int], wait: Wait) -> None:
        """Write the content of slots to files, as far as the disk keeps up."""
        for hash_, slot in zip(hashes, slots, strict=True):
            with suppress(Full):
                self._writes.put_nowait(_Transfer(hash_, slot, self._numbers[slot], wait))

    def fetch(self, hashes: Sequence[bytes], slots: Sequence[int], wait: Wait) -> None:
        """Read files into slots, which nothing else uses until they are reported."""
        now = time.monotonic()
        self.overwrite(slots)
        with self._lock:
            if not self.reads:
                self._news.failed += hashes
                self.notify()
                return
            self._deadline = MAX_FETCH_SECONDS + (self._deadline if self._pending else now)
            for hash_, slot in zip(hashes, slots, strict=True):
                self._pending.add(hash_)
                self._fetches.put(_Transfer(hash_, slot, self._request, wait))

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Delete files whose content may be wrong."""
        self.overwrite(range(len(self._numbers)))  # a write that waits may be one of them
        with self._lock:
            for hash_ in hashes:
                self._files.pop(hash_, None)
                self._doomed.add(hash_)
                self._fetches.put(_Transfer(hash_, -1, self._request, int))

    def restart(self) -> None:
        """Forget all requests: no slot is written from now on; list the files again."""
        with self._lock:
            self._cancel()
            self._news = FolderReport(-1, -1, added=list(self._files))
            self.notify()

    def check_time(self) -> None:
        """Give up reading from a disk that is too slow."""
        with self._lock:
            if self._pending and self._deadline < time.monotonic():
                self._news.failed += self._pending
                self._cancel()
                self.reads = False
                log.warning(
                    "%s: more than %.0f s for a prefix; its files are not used any more",
                    *(self._disk.folder, MAX_FETCH_SECONDS),
                )
                self.notify()

    def take_report(self) -> FolderReport | None:
        """Return what is new, if anything; the caller fills in epoch and rank."""
        with self._lock:
            report, later = self._news, self._news.added[MAX_REPORTED:]
            self._news = FolderReport(-1, -1, added=later)
        del report.added[MAX_REPORTED:]
        return None if report == FolderReport(-1, -1) else report

    def _cancel(self) -> None:
        """Cancel what is read, and wait until no thread writes to a slot; the lock is held."""
        self._request += 1
        self._pending.clear()
        self._lock.wait_for(lambda: not self._num_copying)

    # ---- threads -----------------------------------------------------------------------------

    def _start(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, daemon=True).start()

    def _list(self) -> None:
        """Find the files of earlier workers."""
        found: list[bytes] = []
        with self._logging_errors():
            found.extend(self._disk.scan(self._warn_once))
        with self._lock:
            new, self._files = self._files, OrderedDict.fromkeys(found)
            self._files.update(new)
            self._news.added = list(self._files)
            self._is_listed = True
        log.info("KV blocks in %s: %d", self._disk.folder, len(found))
        with self._logging_errors():
            self._remove_excess()
        self.notify()

    def _write_all(self) -> None:
        while True:
            write = self._writes.get()
            with self._lock:
                exists = write.hash in self._files or write.hash in self._doomed
            if exists or not self._is_right(write):
                continue
            write.wait()
            with self._logging_errors():
                self._remove_excess()  # where that fails, nothing more may be written
                if self._write(write):
                    with self._lock:
                        self._files[write.hash] = None
                        self._news.added.append(write.hash)
                self._remove_excess()
            self.notify()

    def _write(self, write: _Transfer) -> bool:
        """Write as `KvFiles.write`; on a full disk, remove the oldest files for it."""
        content = memoryview(self._host[write.slot])
        while True:
            try:
                return self._disk.write(write.hash, content, partial(self._is_right, write))
            except OSError as error:
                if error.errno not in FULL or not self._remove_oldest():
                    raise
                self._warn_once(error)

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        kind = type(error), error.errno
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("KV blocks in %s: %s", self._disk.folder, error)

    def _remove_excess(self) -> None:
        while len(self._files) > self.max_files and self._remove_oldest():
            pass

    def _remove_oldest(self) -> bool:
        """Remove the file used least recently; return False if there is none. Raises OSError."""
        with self._lock:
            if not self._is_listed or not self._files:
                return False
            oldest = next(iter(self._files))
        self._disk.remove(oldest)
        with self._lock:
            if oldest in self._files:  # no other thread was faster
                del self._files[oldest]
                self._news.removed.append(oldest)
        return True

    def _is_right(self, write: _Transfer) -> bool:
        """Return whether a slot has still the content that is to be written."""
        return self._numbers[write.slot] == write.number

    def _fetch_all(self) -> None:
        buffer = bytearray(self._disk.file_bytes)
        while True:
            fetch = self._fetches.get()
            if fetch.slot < 0:
                self._remove(fetch.hash)
                continue
            if fetch.number != self._request:
                continue
            content = self._read(fetch.hash, buffer)
            with self._lock:
                if fetch.number != self._request:
                    continue
                self._num_copying += 1
            if content is not None:
                fetch.wait()
                self._host[fetch.slot] = np.frombuffer(content, np.uint8)
            self._end(fetch, content is not None)

    def _remove(self, hash_: bytes) -> None:
        with self._logging_errors():
            self._disk.remove(hash_)
            with self._lock:
                self._doomed.discard(hash_)

    def _read(self, hash_: bytes, buffer: bytearray) -> memoryview | None:
        """Return the content of a file, or None if it can't be used."""
        with self._lock:
            if hash_ in self._doomed:
                return None
        # a file may be removed meanwhile, by this worker or another one
        with self._logging_errors(), suppress(FileNotFoundError):
            return self._disk.read(hash_, buffer)
        return None

    def _end(self, fetch: _Transfer, is_right: bool) -> None:
        """Report a fetch, unless it was cancelled."""
        with self._lock:
            self._num_copying -= 1
            self._lock.notify_all()
            if fetch.hash not in self._pending:
                return
            self._pending.remove(fetch.hash)
            (self._news.fetched if is_right else self._news.failed).append(fetch.hash)
            if fetch.hash in self._files and is_right:
                self._files.move_to_end(fetch.hash)
            else:
                self._files.pop(fetch.hash, None)
        self.notify()
