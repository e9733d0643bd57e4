"""Which pipelines run."""

import fcntl
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from penstock.launch.errors import LaunchError
from penstock.launch.run_folder import LOCK_FILE, claim, restore_config, running_config, stop
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


def test_a_folder_that_someone_else_made_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / f"penstock-{os.getuid()}").touch()
    with pytest.raises(LaunchError, match="run folder"), claim(CONFIG):
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


def test_stop_returns_when_the_lock_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    stopped = threading.Event()

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGTERM)
        stopped.set()

    def flock(descriptor: int, kind: int, original: object = fcntl.flock) -> None:
        assert callable(original)
        original(descriptor, kind)
        order.append("locked" if not kind & fcntl.LOCK_NB else "tried")

    def hold() -> None:
        with claim(CONFIG):
            claimed.set()
            assert stopped.wait(5)
            order.append("dropped")

    claimed = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert claimed.wait(5)
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(fcntl, "flock", flock)
    stop("x")
    holder.join()
    assert order == ["dropped", "locked"]
