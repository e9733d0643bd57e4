"""Which pipelines run."""

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from penstock.launch.errors import LaunchError
from penstock.launch.running import LOCK_FILE, claim, running_config, stop
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
