"""Discovery of running pipelines."""

import fcntl
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.launch.pipeline import run_folder as run_folder_module
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.run_folder import (
    LOCK_FILE,
    claim,
    is_running,
    restore_config,
    running_config,
    stop,
)
from penstock.protocol.config import Config, run_folder, write_config

CONFIG = Config(name="x", tp=2)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_the_folder_is_there_while_it_is_claimed() -> None:
    with claim(CONFIG) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_name_is_claimed_once() -> None:
    with claim(CONFIG):
        with pytest.raises(LaunchError, match="'x' runs already; --name"), claim(CONFIG):
            pass
        with claim(Config(name="y")):
            pass
    with claim(CONFIG):
        pass


def test_what_a_killed_pipeline_left_is_swept_away() -> None:
    folder = run_folder("x")
    (folder / "folder").mkdir(parents=True)
    for name in (LOCK_FILE, "config.json", "requests", "folder/file"):
        (folder / name).touch()
    with claim(CONFIG):
        assert [left.name for left in folder.iterdir()] == [LOCK_FILE]


KILLED = """
import os, signal, socket
from penstock.launch.pipeline.run_folder import *
config = Config(name="killed", endpoint=f"ipc://{run_folder('x').parent.parent}/clients")
with claim(config), socket.socket(socket.AF_UNIX) as clients:
    write_config(config)
    clients.bind(config.endpoint.removeprefix("ipc://"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_pipeline_of_any_name_sweeps_away_what_a_killed_one_left(tmp_path: Path) -> None:
    """Folders in use, those of other runners, and sockets in use stay."""
    subprocess.run([sys.executable, "-P", "-c", KILLED], check=False)
    clients = tmp_path / "clients"
    assert clients.is_socket()
    others = run_folder("other-runner"), run_folder("y")
    others[0].mkdir()
    with claim(Config(name="y")), claim(CONFIG):
        assert all(one.exists() for one in others)
        assert not run_folder("killed").exists()
    assert not clients.exists()
    subprocess.run([sys.executable, "-P", "-c", KILLED], check=False)
    clients.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(clients))
        successor.listen()
        with claim(CONFIG):
            assert not run_folder("killed").exists()
        assert clients.is_socket()


def test_processes_of_another_runner_keep_the_folder_of_a_killed_pipeline() -> None:
    """They hold no lock, but listen."""
    subprocess.run([sys.executable, "-P", "-c", KILLED], check=False)
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(str(run_folder("killed") / "gateway"))
        gateway.listen()
        with claim(CONFIG):
            assert run_folder("killed").exists()
    with claim(CONFIG):
        assert not run_folder("killed").exists()


def test_a_command_that_looks_for_a_pipeline_does_not_refuse_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = run_folder("x")
    folder.mkdir(parents=True)
    reader = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(reader, fcntl.LOCK_SH)
    try_lock = run_folder_module._try_lock

    def try_and_leave(lock: int, kind: int) -> bool:
        found = try_lock(lock, kind)
        if kind == fcntl.LOCK_SH:
            fcntl.flock(reader, fcntl.LOCK_UN)
        return found

    monkeypatch.setattr(run_folder_module, "_try_lock", try_and_leave)
    with claim(CONFIG):
        assert is_running("x")
    os.close(reader)


def test_a_start_makes_its_folder_when_no_other_may_remove_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another start may remove the folder that a killed pipeline of this name left."""
    existed, flock = [], fcntl.flock

    def record(lock: int, kind: int) -> None:
        existed.append(run_folder("x").exists())
        flock(lock, kind)

    monkeypatch.setattr(fcntl, "flock", record)
    with claim(CONFIG):
        assert existed[:2] == [False, True]  # of all folders, then of its own


def test_pipelines_that_start_at_once_do_not_refuse_one_another() -> None:
    """Each tries the locks of all others."""
    with ThreadPoolExecutor(8) as pool:

        def claim_often(name: str) -> None:
            for _ in range(100):
                with claim(Config(name=name)):
                    pass

        list(pool.map(claim_often, "abcdefgh"))


@pytest.mark.parametrize("room", [(100, 9, 9, 100, 99, 99), (9999, 9000, 9000, 100, 3, 3)])
def test_a_full_disk_is_a_sentence(room: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without free blocks, or without free files."""
    full = os.statvfs_result((4096, 4096, *room, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(LaunchError, match="has no space left; set XDG_RUN"), claim(CONFIG):
        pass


def test_a_folder_that_can_not_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Someone else has made a file there, or there is no parent."""
    (tmp_path / f"penstock-{os.getuid()}").touch()
    with pytest.raises(LaunchError, match="run folder"), claim(CONFIG):
        pass
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    sentence = r"can't be made: .*/none/penstock-\d+: No such file or directory; set XDG_RUNTIME"
    with pytest.raises(LaunchError, match=sentence), claim(CONFIG):
        pass


@pytest.mark.parametrize("which", ["parent", "folder"])
def test_a_link_is_not_followed(tmp_path: Path, which: str) -> None:
    """Somebody else may have made it, to have a folder of this user chmodded and emptied."""
    target, folder = tmp_path / "precious", run_folder("x")
    (target / "x").mkdir(parents=True)
    for path in (target, target / "x"):
        path.chmod(0o755)
    (target / "x" / LOCK_FILE).write_text("1")
    (target / "x" / "file").touch()
    if which == "parent":
        folder.parent.symlink_to(target)
    else:
        folder.parent.mkdir()
        folder.symlink_to(target / "x")
    with pytest.raises(LaunchError, match=r"is a symbolic link.*XDG_RUNTIME_DIR"), claim(CONFIG):
        pass
    for ask in (running_config, stop):  # the file may name any process of this user
        with pytest.raises(LaunchError, match="is a symbolic link"):
            ask("x")
    assert (target / "x" / "file").exists()
    assert [path.stat().st_mode & 0o777 for path in (target, target / "x")] == [0o755] * 2


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_into_is_refused(mode: int) -> None:
    run_folder("x").parent.mkdir()
    run_folder("x").parent.chmod(mode)
    with pytest.raises(LaunchError, match=f"has mode {mode:o}, so that others"), claim(CONFIG):
        pass


def test_a_link_in_the_folder_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    run_folder("x").mkdir(parents=True)
    (run_folder("x") / "link").symlink_to(tmp_path / "precious")
    with claim(CONFIG) as folder:
        assert [left.name for left in folder.iterdir()] == [LOCK_FILE]
    assert (tmp_path / "precious").exists()


def test_a_configuration_that_was_removed_or_changed_is_restored() -> None:
    with claim(CONFIG) as folder:
        for spoil in (Path.unlink, lambda path: path.write_text("{")):
            path = write_config(CONFIG)
            spoil(path)
            restore_config(CONFIG)
            assert running_config("x") == CONFIG
        before = path.stat().st_ino
        restore_config(CONFIG)
        assert path.stat().st_ino == before
        shutil.rmtree(folder)
        with pytest.raises(LaunchError, match="was removed while the pipeline ran"):
            restore_config(CONFIG)


def test_only_a_running_pipeline_has_a_configuration() -> None:
    with pytest.raises(LaunchError, match="no pipeline 'x' runs"):
        running_config("x")
    with claim(CONFIG):
        with pytest.raises(LaunchError, match="only just begun"):
            running_config("x")
        write_config(CONFIG)
        assert running_config("x") == CONFIG
    write_config(CONFIG)
    (run_folder("x") / LOCK_FILE).touch()
    with pytest.raises(LaunchError, match="no pipeline 'x' runs"):
        running_config("x")


def test_stop_returns_when_the_process_has_ended() -> None:
    """A large process drops its lock long before: its memory is still to be freed."""
    code = (
        "import signal, sys; from penstock.launch.pipeline.run_folder import *; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);\n"
        f"with claim(Config(name='{CONFIG.name}')): "
        "print(1, flush=True); signal.sigwait([signal.SIGTERM])\n"
        "print(2, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == b"1\n"
        with os.fdopen(os.pidfd_open(holder.pid)) as end:
            order: list[bool] = []

            def run() -> None:
                stop(CONFIG.name)
                order.append(bool(select.select([end], [], [], 0)[0]))

            stopping = threading.Thread(target=run)
            stopping.start()
            assert holder.stdout.readline() == b"2\n"
            with pytest.raises(LaunchError, match="no pipeline 'x' runs"):
                running_config(CONFIG.name)  # the lock is free
            stopping.join(0.2)  # what does not wait ends here
            holder.stdin.close()
            stopping.join()
            assert order == [True]
