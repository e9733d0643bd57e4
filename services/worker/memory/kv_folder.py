"""The folder tier of the KV cache: blocks in files, named by the hash of their whole prefix.

Threads read and write, so that the main thread never waits for the disk. A file is read as a whole,
compared with its checksum, and then copied to its host slot. A failing disk only costs cache hits:
a block that can't be written is skipped, and a disk that is too slow is not read again.
"""

import errno
import logging
import math
import os
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.protocol.config import check_own_folder, foreign
from penstock.protocol.messages.worker import FolderReport
from penstock.protocol.processors import num_processors

MAGIC = b"penstKV2"  # the number changes with the definition of the hashes
# MAGIC, digest of the writer's facts, hash of the prefix, checksum of these and of the content
HEADER_BYTES = len(MAGIC) + 32 + 32 + 16
SUFFIX = ".partial"  # suffix of a file that is being written
# Maximum age of a file that is being written. Older files are leftovers of killed workers; files
# with a future time are leftovers of a wrong clock.
MAX_WRITE_SECONDS = 3600
HASH_DIGITS = 64
INSTEAD = "let --kv-offload-folder name a new folder"
# errors that mean a concurrent change of the folder, not a failure of the disk
CHANGED = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError
FULL = errno.ENOSPC, errno.EDQUOT  # errors that the removal of files can resolve


class DamagedFileError(OSError):
    """A file with a wrong size, header or checksum."""


class KvFiles:
    """A folder of files of this user, for the same model and KV layout.

    A file has a header and the content of a host slot. Its name is the hash of the prefix. A file
    could contain any KV, so files and folders that other users may write are not used.
    """

    def __init__(self, folder: Path, digest: bytes, content_bytes: int) -> None:
        """Use files whose facts have this digest, of 32 bytes, in a subfolder of `folder`."""
        self.folder = folder / digest.hex()[:32]
        self._digest = digest
        self.file_bytes = HEADER_BYTES + content_bytes

    def scan(self, on_error: Callable[[OSError], object]) -> Iterator[bytes]:
        """Yield the hashes of all files, most recently used last. Raises OSError.

        on_error: called with an error that concerns only a part of the files.
        """
        self._make_folder()
        found: list[tuple[float, bytes]] = []
        for parent in self.folder.iterdir():
            try:
                self._scan_part(parent, found)
            except CHANGED:
                continue
            except OSError as error:
                on_error(error)
        for _, hash_ in sorted(found):
            yield hash_

    def _scan_part(self, parent: Path, found: list[tuple[float, bytes]]) -> None:
        with os.scandir(parent) as entries:
            for entry in entries:
                with suppress(*CHANGED):
                    self._note(entry, found)

    def _note(self, entry: os.DirEntry[str], found: list[tuple[float, bytes]]) -> None:
        written = entry.stat(follow_symlinks=False).st_mtime
        if _is_hash(entry.name) and entry.is_file(follow_symlinks=False):
            found.append((written, bytes.fromhex(entry.name)))
        elif entry.name.endswith(SUFFIX) and abs(time.time() - written) > MAX_WRITE_SECONDS:
            with suppress(OSError):  # on a read-only disk the file stays
                Path(entry).unlink()

    def write(self, hash_: bytes, content: Any, is_right: Callable[[], bool]) -> bool:
        """Write a file. Return False if `is_right()` becomes false meanwhile. Raises OSError."""
        path = self._path(hash_)
        self._make_folder()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # processes that share the folder may have the same pid, in containers or on other machines
        descriptor, name = tempfile.mkstemp(SUFFIX, path.name, path.parent)
        partial = Path(name)
        try:
            with os.fdopen(descriptor, "wb", 0) as file:
                for part in (self._header(hash_, content), content):
                    rest = memoryview(part)
                    while rest:  # the disk may write a part before it reports an error
                        rest = rest[file.write(rest) :]
            if is_right():
                partial.rename(path)
                if is_right():
                    return True
                self.remove(hash_)
                return False
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        partial.unlink()
        return False

    def read(self, hash_: bytes, buffer: bytearray) -> memoryview:
        """Read a file into `buffer`, which has `file_bytes`. Return the content in the buffer.

        Removes a damaged file. Raises OSError, DamagedFileError.
        """
        path, begin = self._path(hash_), 0
        with open(path, "rb", 0, opener=_open_own) as file:
            while num_bytes := file.readinto(memoryview(buffer)[begin:]):
                begin += num_bytes
            is_whole = begin == len(buffer) and not file.read(1)
            content = memoryview(buffer)[HEADER_BYTES:]
            if not is_whole or buffer[:HEADER_BYTES] != self._header(hash_, content):
                self.remove(hash_)
                raise DamagedFileError(f"{path} is damaged; its block is computed again")
            with suppress(OSError):  # the folder may be read-only
                os.utime(file.fileno())
        return content

    def remove(self, hash_: bytes) -> None:
        with suppress(*CHANGED):
            self._path(hash_).unlink()

    def _make_folder(self) -> None:
        """Make the folder if needed. Raises OSError, also if other users may change the folder."""
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own_folder(folder, instead=INSTEAD)

    def _path(self, hash_: bytes) -> Path:
        name = hash_.hex()
        return self.folder / name[:2] / name

    def _header(self, hash_: bytes, content: Any) -> bytes:
        start = MAGIC + self._digest + hash_
        checksum = xxhash.xxh3_128(start)
        checksum.update(content)
        return start + checksum.digest()


def _is_hash(name: str) -> bool:
    return len(name) == HASH_DIGITS and set(name) <= set("0123456789abcdef")


def _open_own(path: str, flags: int) -> int:
    """Open a regular file of this user. Do not block on a FIFO. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    problem = foreign(descriptor)
    if not problem and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        problem = "is not a regular file"
    if problem:
        os.close(descriptor)
        raise PermissionError(f"{path} {problem}; it is not used")
    return descriptor


log = logging.getLogger(__name__)
MAX_FETCH_SECONDS = 2.0  # time limit for reading all files of a request
MAX_LIST_SECONDS = 2.0  # for which requests wait for the list of the files
NUM_WRITERS = 2
MAX_REPORTED = 10_000  # maximum number of added files in a message
Wait = Callable[[], object]  # waits until the copies that use a slot have ended


class _Transfer(NamedTuple):
    """A block to write, to read or, if `slot` is negative, to remove."""

    hash: bytes
    slot: int
    # number of the slot's content to write, or of the request to read; a later number cancels it
    number: int
    wait: Wait


class KvFolder:
    """The files of a rank, most recently used last, with the threads that read and write them."""

    def __init__(
        self, folder: Path, digest: bytes, max_bytes: float, host: NDArray[np.uint8]
    ) -> None:
        """Prepare the use of a folder, which begins with `start`.

        digest: as in `KvFiles`. host: the slots, [num_slots, slot_bytes].
        """
        self._disk = KvFiles(folder, digest, host.shape[1])
        self._host = host
        self.max_files = int(max_bytes / self._disk.file_bytes)
        # called by any thread when `take_report` may return a report
        self.notify: Callable[[], object] = int
        self._lock = threading.Condition()
        self._files: OrderedDict[bytes, None] = OrderedDict()
        self._numbers = [0] * len(host)  # number of each slot's content
        self._request = 0  # number of the present request; earlier requests are cancelled
        self._num_copying = 0  # number of threads that write to a slot
        self._pending: set[bytes] = set()  # hashes of files that are being read
        self._deadline = 0.0  # time limit for `_pending`, of `time.monotonic`
        # hashes of files that must be removed, and are neither read nor written before that
        self._doomed: set[bytes] = set()
        self._news = FolderReport(-1, -1)  # the next report
        self._is_listed = False
        self._owes_list = False  # True until a report has ended the list that a request asked for
        self._list_deadline = math.inf  # of `time.monotonic`; a report then ends the list
        # kinds of errors that were logged: each kind is logged once
        self._logged: set[tuple[type, int | None]] = set()
        self.reads = True
        self._writes: Queue[_Transfer] = Queue(len(host))
        self._fetches: Queue[_Transfer] = Queue()

    # ---- for the main thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. The first thread lists the files."""
        self._list_deadline = time.monotonic() + MAX_LIST_SECONDS
        self._start(self._list)
        for _ in range(NUM_WRITERS):
            self._start(self._write_all)
        for _ in range(min(8, num_processors())):
            self._start(self._fetch_all)

    def overwrite(self, slots: Iterable[int]) -> None:
        """Record that the content of slots changes from now on."""
        for slot in slots:
            self._numbers[slot] += 1

    def store(self, hashes: Sequence[bytes], slots: Sequence[int], wait: Wait) -> None:
        """Queue the content of slots to be written. Skip blocks while the queue is full.

        hashes: an empty one gets no file.
        """
        for hash_, slot in zip(hashes, slots, strict=True):
            if not hash_:
                continue
            try:
                self._writes.put_nowait(_Transfer(hash_, slot, self._numbers[slot], wait))
            except Full:
                self._end_write(hash_, is_written=False)

    def fetch(self, hashes: Sequence[bytes], slots: Sequence[int], wait: Wait) -> None:
        """Queue files to be read into slots. Nothing else may use the slots until the report."""
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
        self.overwrite(range(len(self._numbers)))  # cancel waiting writes
        with self._lock:
            for hash_ in hashes:
                self._files.pop(hash_, None)
                self._doomed.add(hash_)
                self._fetches.put(_Transfer(hash_, -1, self._request, int))

    def restart(self) -> None:
        """Cancel all requests, so that no slot is written any more. Report all files again."""
        with self._lock:
            self._cancel()
            self._news = FolderReport(-1, -1, added=list(self._files))
            self._owes_list = True
            self.notify()

    def check_time(self) -> None:
        """Stop reading for good if the disk is too slow. End a list that takes too long."""
        with self._lock:
            if self._owes_list and self._ends_list:
                self.notify()
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
        """Return the next report, if any. The caller sets epoch and rank."""
        with self._lock:
            report, later = self._news, self._news.added[MAX_REPORTED:]
            self._news = FolderReport(-1, -1, added=later)
            report.is_listed = self._owes_list and self._ends_list and not later
            self._owes_list &= not report.is_listed
        del report.added[MAX_REPORTED:]
        return None if report == FolderReport(-1, -1) else report

    @property
    def _ends_list(self) -> bool:
        """True if all files are listed, or if requests have waited long enough for that."""
        return self._is_listed or time.monotonic() >= self._list_deadline

    def _cancel(self) -> None:
        """Cancel reads, and wait until no thread writes to a slot. The caller holds the lock."""
        self._request += 1
        self._pending.clear()
        self._lock.wait_for(lambda: not self._num_copying)

    # ---- threads -----------------------------------------------------------------------------

    def _start(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, daemon=True).start()

    def _list(self) -> None:
        """List the files of earlier workers."""
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
            is_written = False
            with self._logging_errors():
                is_written = self._write_once(write)
            self._end_write(write.hash, is_written)
            with self._logging_errors():
                self._remove_excess()

    def _write_once(self, write: _Transfer) -> bool:
        """Write a file that is not there. Return whether the file is there. Raises OSError."""
        with self._lock:
            if write.hash in self._files or write.hash in self._doomed:
                return write.hash in self._files
        if not self._is_right(write):
            return False
        write.wait()
        self._remove_excess()  # if the removal fails, do not write
        return self._write(write)

    def _end_write(self, hash_: bytes, is_written: bool) -> None:
        """Report whether a file is there."""
        with self._lock:
            if is_written:
                self._files.setdefault(hash_)
            (self._news.added if is_written else self._news.unwritten).append(hash_)
        self.notify()

    def _write(self, write: _Transfer) -> bool:
        """Write as `KvFiles.write` does. On a full disk, remove the oldest files and retry."""
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
        """Remove the least recently used file. Return False without files. Raises OSError."""
        with self._lock:
            if not self._is_listed or not self._files:
                return False
            oldest = next(iter(self._files))
        self._disk.remove(oldest)
        with self._lock:
            if oldest in self._files:  # no other thread has removed the file
                del self._files[oldest]
                self._news.removed.append(oldest)
        return True

    def _is_right(self, write: _Transfer) -> bool:
        """Return whether a slot still has the content to write."""
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
        # this worker or another worker may remove the file meanwhile
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
