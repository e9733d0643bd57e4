"""Folders that only this user may open, in places where everybody may write (/tmp)."""

import contextlib
import os
from pathlib import Path

_OTHERS_WRITE = 0o022


def make_own_folder(path: Path) -> None:
    """Makes a folder, of mode 0700. Raises PermissionError as `check_own_folder`."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check(path, make_private=True)


def check_own_folder(path: Path) -> None:
    """Raises PermissionError where anybody else has put something: a symbolic link, a folder of
    another user or one that others may write into; FileNotFoundError where nothing is."""
    _check(path, make_private=False)


def _check(path: Path, *, make_private: bool) -> None:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        what = "a symbolic link" if path.is_symlink() else "a file"
        raise _refused(path, f"is {what}") from None
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid():
            raise _refused(path, f"belongs to user {status.st_uid}")
        if status.st_mode & _OTHERS_WRITE:
            raise _refused(path, f"has mode {status.st_mode & 0o777:o}, so that others may write")
        if make_private:
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)


def _refused(path: Path, what: str) -> PermissionError:
    return PermissionError(
        f"{path} {what}, expected a folder of user {os.getuid()} alone; remove it, or set "
        "XDG_RUNTIME_DIR to a folder that only you may write into"
    )
