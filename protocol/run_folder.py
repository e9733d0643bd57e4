"""The run folder of a pipeline, its `config.json`, and the configuration of a process.

Folders in places where everybody may write (/tmp) are opened only if they are this user's alone.
"""

import os
import tempfile
from pathlib import Path

import msgspec

from penstock.protocol.config import Config, PipelineConfig
from penstock.protocol.field_errors import explain

CONFIG_FILE = "config.json"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
API_KEY_VARIABLE = "PENSTOCK_API_KEY"
_OTHERS_WRITE = 0o022
_INSTEAD = "set XDG_RUNTIME_DIR to a folder that only you may write into"


def make_own_folder(path: Path) -> None:
    """Make a folder of mode 0700. Raises OSError, and PermissionError as `check_own_folder`."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}; {_INSTEAD}") from error
    check_own_folder(path, make_private=True)


def check_own_folder(path: Path, *, make_private: bool = False, instead: str = _INSTEAD) -> None:
    """Raise PermissionError for a folder that is not this user's alone, or a symbolic link.

    Raises FileNotFoundError if there is none. make_private: give it mode 0700. instead: what to
    do where nothing can be removed.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        what = "a symbolic link" if path.is_symlink() else "a file"
        raise _refused(path, f"is {what}", instead) from None
    try:
        if problem := foreign(folder):
            raise _refused(path, problem, instead)
        if make_private:
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)


def foreign(descriptor: int) -> str:
    """Return why an open file or folder is not this user's alone; empty if it is."""
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}"
    others_write = status.st_mode & _OTHERS_WRITE
    return f"has mode {status.st_mode & 0o777:o}, so that others may write" if others_write else ""


def _refused(path: Path, what: str, instead: str) -> PermissionError:
    return PermissionError(
        f"{path} {what}, expected a folder of user {os.getuid()} alone; remove it, or {instead}"
    )


def make_run_folder(config: Config) -> Path:
    """Create the run folder, for this user only. Raises PermissionError as `check_own_folder`.

    The umask is set, so that files of this process and its children are for this user only, too:
    sockets get their mode from it when they are bound.
    """
    make_parent_folder(config)
    make_own_folder(config.run_folder)
    return config.run_folder


def make_parent_folder(config: Config) -> Path:
    """Create the folder of all run folders, as `make_run_folder`."""
    os.umask(0o077)
    make_own_folder(config.run_folder.parent)
    return config.run_folder.parent


def write_config(config: Config) -> Path:
    """Write `config.json` into the run folder, atomically. Return its path."""
    path = make_run_folder(config) / CONFIG_FILE
    descriptor, new = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(config)))
    return Path(new).rename(path)


def read_config(path: Path) -> Config:
    """Read a configuration. Raises msgspec.ValidationError for an invalid file."""
    raw = path.read_bytes()
    config = msgspec.json.decode(raw, type=PipelineConfig)
    return config if config.models else msgspec.json.decode(raw, type=Config)


def config_from_environment() -> Config:
    """Return what `launch` wrote, or `PENSTOCK_<FIELD>` variables over the defaults.

    Raises msgspec.ValidationError; OSError and ValueError for an unusable API key file.
    """
    if path := os.environ.get(CONFIG_VARIABLE):
        return read_config(Path(path))
    given: dict[str, str | list[str]] = {
        field: os.environ[f"PENSTOCK_{field.upper()}"]
        for field in Config.__struct_fields__
        if f"PENSTOCK_{field.upper()}" in os.environ
    }
    if names := given.get("served_model_name"):
        given["served_model_name"] = str(names).split()
    try:
        config = msgspec.convert(given, Config, strict=False)
    except msgspec.ValidationError as error:
        field, _, reason = explain(str(error), given, Config)[1].partition(":")
        raise msgspec.ValidationError(f"PENSTOCK_{field.upper()}:{reason}") from None
    return with_api_key(config)


def with_api_key(config: Config) -> Config:
    """Return `config` with the API key: given, in `api_key_file`, or in the environment.

    Raises OSError for a file that can't be read, ValueError for one without a key.
    """
    key = config.api_key
    if not key and config.api_key_file:
        key = Path(config.api_key_file).read_text().partition("\n")[0].strip()
        if not key:
            raise ValueError(f"api_key_file: the first line of {config.api_key_file} is empty")
    return msgspec.structs.replace(config, api_key=key or os.getenv(API_KEY_VARIABLE, "").strip())
