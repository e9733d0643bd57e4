"""Files of KV blocks: a header and the content of a host slot, named by the hash of the prefix."""

import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from penstock.protocol.run_folder import check_own_folder, foreign

MAGIC = b"penstKV2"  # another number for another definition of the hashes
# MAGIC, digest of what wrote it, hash of the prefix, checksum of all that and the content
HEADER_BYTES = len(MAGIC) + 32 + 32 + 16
SUFFIX = ".partial"  # of a file that is being written
# in which a file is written; a killed worker left others, and those of a wrong clock
MAX_WRITE_SECONDS = 3600
HASH_DIGITS = 64
INSTEAD = "let --kv-offload-folder name a new folder"
# errors that say nothing about the disk: somebody has changed the folder meanwhile
CHANGED = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError
FULL = errno.ENOSPC, errno.EDQUOT  # errors that end when files are removed


class DamagedFileError(OSError):
    """A file that is not what was written."""


class KvFiles:
    """A folder of files that were written for the same model and layout of KV, by this user.

    Whoever may write there may write any KV, so nothing of others is used.
    """

    def __init__(self, folder: Path, digest: bytes, content_bytes: int) -> None:
        """digest: 32 bytes, of all that must be equal for a file to be used."""
        self.folder = folder / digest.hex()[:32]
        self._digest = digest
        self.file_bytes = HEADER_BYTES + content_bytes

    def scan(self, on_error: Callable[[OSError], object]) -> Iterator[bytes]:
        """Yield the hashes of all files, the one used last last. Raises OSError.

        on_error: called with errors that concern some of the files.
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
        """Write a file, or return False if `is_right()` becomes false meanwhile. Raises OSError."""
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
                    while rest:  # the disk may take a part before it reports an error
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
        """Read a file into `buffer`, of `file_bytes`; return its content.

        Removes a file that is damaged. Raises OSError, DamagedFileError.
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
            with suppress(OSError):  # nothing may be changed there
                os.utime(file.fileno())
        return content

    def remove(self, hash_: bytes) -> None:
        with suppress(*CHANGED):
            self._path(hash_).unlink()

    def _make_folder(self) -> None:
        """Make the folder if there is none. Raises OSError, also where others may change it."""
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
    """Open a file of this user alone; a FIFO in its place does not block. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    problem = foreign(descriptor)
    if not problem and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        problem = "is not a regular file"
    if problem:
        os.close(descriptor)
        raise PermissionError(f"{path} {problem}; it is not used")
    return descriptor
