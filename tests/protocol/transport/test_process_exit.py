"""Exits of processes, by a pidfd and without."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from penstock.protocol.transport import process as process_exit
from penstock.protocol.transport.process import ProcessExit

SLEEP = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
GRANDCHILD = f"""
import subprocess, sys
child = subprocess.Popen({SLEEP!r}, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture(params=["pidfd", "thread", "refused"], autouse=True)
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "thread":  # psutil, which waits in the thread, keeps its own `os`
        without = {name: its for name, its in vars(os).items() if name != "pidfd_open"}
        monkeypatch.setattr(process_exit, "os", SimpleNamespace(**without))
    elif request.param == "refused":

        def refuse(_pid: int) -> int:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        refusing = {**vars(os), "pidfd_open": refuse}
        monkeypatch.setattr(process_exit, "os", SimpleNamespace(**refusing))


def test_a_child_and_its_exit_code() -> None:
    with (
        subprocess.Popen(SLEEP, stdout=subprocess.PIPE) as child,
        contextlib.closing(ProcessExit(child.pid, child.wait)) as process,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        assert not process.wait(0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60)
        process.send_signal(signal.SIGTERM)
    assert child.returncode == -signal.SIGTERM


def test_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        with contextlib.closing(ProcessExit(int(parent.stdout.readline()))) as process:
            assert not process.wait(0)
            process.send_signal(signal.SIGKILL)
            assert process.wait(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unforeseen_exception_of_the_wait_ends_it(request: pytest.FixtureRequest) -> None:
    if "pidfd" in request.node.name:
        pytest.skip("has no thread")
    others = set(threading.enumerate())
    with contextlib.closing(ProcessExit(os.getpid(), sys.exit)) as process:
        assert process.wait(60)
    for thread in set(threading.enumerate()) - others:
        thread.join()  # otherwise it may report its exception during the next test


def test_a_process_that_has_exited() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    with pytest.raises(ProcessLookupError):
        ProcessExit(child.pid)
