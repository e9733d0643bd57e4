"""Run folders: a running pipeline holds the lock in its folder."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import (
    CONFIG_FILE,
    CONFIG_VARIABLE,
    Config,
    check_own_folder,
    make_parent_folder,
    make_run_folder,
    read_config,
    run_folder,
    write_config,
)
from penstock.protocol.transport.context import host_and_port
from penstock.protocol.transport.process import ProcessExit

LOCK_FILE = "lock"
# free bytes and files needed in a run folder's file system, for the lock, `config.json` and its
# successor, and sockets
NEEDED_BYTES, NEEDED_FILES = 1 << 16, 16


def control_endpoint(folder: Path) -> str:
    """Return the endpoint of the supervisor's control socket in a run folder."""
    return f"ipc://{folder}/control"


@contextlib.contextmanager
def claim(config: Config) -> Iterator[Path]:
    """Make the run folder, empty and held by this process only, and remove it at the end.

    The kernel releases the lock when its holder dies, so the folder of a killed pipeline is free.
    All free folders in which no process listens are removed, since names of private pipelines are
    never reused.
    """
    with starting_alone(config):
        for other in config.run_folder.parent.iterdir():
            _remove_if_left(other)
        lock = _lock(config)
    folder = os.open(config.run_folder, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_SH)  # systemd-tmpfiles does not clean locked folders
    try:
        for left in config.run_folder.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != LOCK_FILE:
                left.unlink()
        yield config.run_folder
    finally:
        shutil.rmtree(config.run_folder, ignore_errors=True)
        os.close(folder)
        os.close(lock)


@contextlib.contextmanager
def starting_alone(config: Config) -> Iterator[None]:
    """Wait for other pipelines that are starting, since they try the locks of all folders."""
    with _refusing_folder():
        parent = os.open(make_parent_folder(config), os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        yield
    finally:
        os.close(parent)


def _remove_if_left(folder: Path) -> None:
    """Remove the remains of a killed pipeline: its run folder, and the socket of its endpoint."""
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # not a folder of a `launch` pipeline
        return
    try:
        # the folder may be used by processes of another runner, which hold no lock
        if _try_lock(lock, fcntl.LOCK_EX) and not any(map(answers, folder.rglob("*"))):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                remove_socket(read_config(folder / CONFIG_FILE).endpoint)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def remove_socket(endpoint: str) -> None:
    """Remove the file of an `ipc://` endpoint, unless a process listens; libzmq keeps the file."""
    path = Path(endpoint.removeprefix("ipc://"))
    if endpoint.startswith("ipc://") and path.is_socket() and not answers(path):
        path.unlink()


def answers(path: str | Path) -> bool:
    """Return whether a process listens on the socket: ZeroMQ would silently replace its file."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        return client.connect_ex(str(path)) == 0
    return False


def configs_of_others(config: Config) -> Iterator[Config]:
    """Yield the configurations in the run folders of this user's other pipelines."""
    for folder in config.run_folder.parent.iterdir():
        if folder != config.run_folder:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                yield read_config(folder / CONFIG_FILE)


def restore_config(config: Config) -> None:
    """Write `config.json` again if it was removed or changed, before a process reads it.

    Raises LaunchError if the run folder was removed, since processes could not reach each other.
    """
    folder = config.run_folder
    if not (folder / LOCK_FILE).is_file():
        raise LaunchError(
            f"run folder {folder} was removed while the pipeline ran; start it again, with "
            "XDG_RUNTIME_DIR set to a folder that nothing cleans"
        )
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        if read_config(folder / CONFIG_FILE) == config:
            return
    write_config(config)


def _lock(config: Config) -> int:
    with _refusing_folder():
        path = make_run_folder(config) / LOCK_FILE
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        _check_space(path.parent)
    if not _try_lock(lock, fcntl.LOCK_EX):
        if not _try_lock(lock, fcntl.LOCK_SH):
            raise LaunchError(f"a pipeline {config.name!r} runs already; --name gives another name")
        fcntl.flock(lock, fcntl.LOCK_EX)  # a command tests the lock at this moment
    if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
        os.close(lock)  # its last holder has just removed the file
        return _lock(config)
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock


@contextlib.contextmanager
def _refusing_folder() -> Iterator[None]:
    """Raise LaunchError if a run folder can't be made."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"the run folder can't be made: {error}") from error


def _check_space(folder: Path) -> None:
    """Raise OSError if there is no space for the files of a run folder."""
    facts = os.statvfs(folder)
    has_files = not facts.f_files or facts.f_favail >= NEEDED_FILES  # 0: no limit
    if facts.f_bavail * facts.f_frsize < NEEDED_BYTES or not has_files:
        text = f"{folder} has no space left; set XDG_RUNTIME_DIR to another folder"
        raise OSError(text)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _open_lock(name: str) -> Iterator[int]:
    """Open the lock of a running pipeline. Raises LaunchError if it does not run."""
    folder = run_folder(name)
    try:
        for path in (folder.parent, folder):
            check_own_folder(path)
        lock = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise _not_running(name) from None
    except OSError as error:
        raise LaunchError(f"the run folder can't be used: {error}") from error
    try:
        if _try_lock(lock, fcntl.LOCK_SH):
            raise _not_running(name)
        yield lock
    finally:
        os.close(lock)


def _not_running(name: str) -> LaunchError:
    return LaunchError(
        f"no pipeline {name!r} runs; `launch all` starts one, --name names another one"
    )


def running_config(name: str) -> Config:
    """Return the configuration of a running pipeline. Raises LaunchError if it does not run."""
    with _open_lock(name):
        try:
            return read_config(run_folder(name) / CONFIG_FILE)
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise LaunchError(f"pipeline {name!r} has only just begun to start") from error


def is_running(name: str) -> bool:
    """Return whether a pipeline of this name runs."""
    try:
        with _open_lock(name):
            return True
    except LaunchError:
        return False


def environment(config: Config) -> dict[str, str]:
    """Return the environment of the pipeline's processes, whose `python` is this Python."""
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), path)),
        CONFIG_VARIABLE: str(config.run_folder / CONFIG_FILE),
    }


def stop(name: str) -> None:
    """Send SIGTERM to the supervisor and wait until it has exited."""
    with _open_lock(name) as lock:
        try:
            supervisor = ProcessExit(int(os.pread(lock, 20, 0)))
        except ProcessLookupError:  # it is exiting, or a PID namespace hides it
            fcntl.flock(lock, fcntl.LOCK_SH)
            return
        with contextlib.closing(supervisor):
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()  # a large process frees its memory only after releasing the lock


def base_url(config: Config) -> str:
    """Return the base URL of the HTTP processes on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.http_host, config.http_host)  # noqa: S104
    return f"http://{host_and_port(host, config.http_port)}"


def model_name(config: Config) -> str:
    """Return the name of the served model, or the names of several models."""
    models = config.by_model()
    if len(models) == 1 and not (config.model or config.served_model_name):
        return "Qwen3 demo"
    return ", ".join(model.model_name for model in models)
