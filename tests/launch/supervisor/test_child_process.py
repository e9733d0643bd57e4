"""Stops and ends of children, and orphans: real processes."""

import asyncio
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest

from penstock.launch.supervisor.child_process import ChildEvents, ChildProcess, adopting
from penstock.launch.supervisor.output import Log
from penstock.protocol.transport import process as process_exit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
PR_GET_CHILD_SUBREAPER = 37
MAX_STOP = 0.2
JUMP = 10.0


class Site:
    """Children, and the pids of those that were stopped for too long."""

    def __init__(self) -> None:
        self.stopped: asyncio.Queue[int] = asyncio.Queue()
        self.events = ChildEvents(MAX_STOP, self.stopped.put_nowait)
        self.children: list[subprocess.Popen[str]] = []

    def start(self, code: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.children.append(
            subprocess.Popen(command, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
        )
        return self.children[-1]


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    one = Site()
    try:
        yield one
    finally:
        one.events.close()
        for child in one.children:
            child.kill()
            child.communicate()


async def test_only_a_child_that_stays_stopped_is_reported() -> None:
    async with site() as one:
        other, child = one.start("input()"), one.start("input()")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(other.pid, number)
        os.kill(child.pid, signal.SIGSTOP)
        assert await one.stopped.get() == child.pid
        assert one.stopped.empty()
        assert not one.events._timers


async def test_a_child_that_continues_and_is_stopped_again_has_its_time_again() -> None:
    async with site() as one:
        one.events._max_stop = 3600.0
        child = one.start("input()")
        os.kill(child.pid, signal.SIGSTOP)
        while not (first := dict(one.events._timers)):
            await asyncio.sleep(0)
        os.kill(child.pid, signal.SIGCONT)
        while one.events._timers:
            await asyncio.sleep(0)
        assert first[child.pid].cancelled()
        one.events._max_stop = MAX_STOP
        os.kill(child.pid, signal.SIGSTOP)
        assert await one.stopped.get() == child.pid


async def test_nobody_is_reported_at_once_after_all_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop's clock jumps, as when this process was stopped, too."""
    loop = asyncio.get_running_loop()
    async with site() as one:
        child = one.start("input()")
        os.kill(child.pid, signal.SIGSTOP)
        while not one.events._timers:
            await asyncio.sleep(0)
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + JUMP)
        begin = clock()
        assert await one.stopped.get() == child.pid
        assert clock() >= begin + MAX_STOP  # from the moment at which it ran again


async def test_orphans_of_children_are_collected() -> None:
    """A compiler that a worker has started, for example, when the worker is killed."""
    async with site() as one:
        code = "import os; pid = os.fork(); pid and print(pid, flush=True); os.read(0, 1)"
        with adopting():
            child = one.start(code)
            assert child.stdout
            orphan = psutil.Process(int(child.stdout.readline()))
            child.kill()
            child.wait()
        assert orphan.ppid() == os.getpid()
        orphan.kill()
        while psutil.pid_exists(orphan.pid):
            await asyncio.sleep(0)


def test_orphans_are_adopted_until_nobody_wants_them() -> None:
    """Two fork servers may fork at once."""

    def is_adopting() -> int:
        flag = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
        return flag.value

    with ExitStack() as first:
        first.enter_context(adopting())
        with adopting():
            first.close()
            assert is_adopting()
    assert not is_adopting()


async def test_exits_of_children_are_left_to_whoever_started_them() -> None:
    async with site() as one:
        child = one.start("raise SystemExit(7)")
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        one.events.receive()
        assert child.wait() == 7


async def test_the_exit_code_of_a_child_without_a_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(process_exit, "os", SimpleNamespace(**vars(os) | {"pidfd_open": refuse}))
    log = Log(lambda _: None)
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    assert await ChildProcess.adopt(pid, log).end == "exit code 3"
    log.close()
