"""A fork server of a line in a test, with the lines of what it forks."""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from penstock.launch.supervisor.child_process import ChildEvents, ChildProcess
from penstock.launch.supervisor.local import ForkServer
from penstock.launch.supervisor.output import Log
from penstock.launch.supervisor.processes import Tasks

SERVE = """
import os, signal, sys
from penstock.protocol.transport.socket_pairs import serve_forks
service = serve_forks()
assert service == "demo", service
print(os.environ["WHO"], os.getppid(), os.getsid(0) == os.getpid(), flush=True)
"""


def command(code: str) -> str:
    return shlex.join([sys.executable, "-P", "-c", code])


def started(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Site:
    """A fork server, and the lines of what it forks."""

    def __init__(self, code: str) -> None:
        self.errors: list[BaseException] = []
        self.said: list[str] = []
        self.stopped: asyncio.Queue[int] = asyncio.Queue()
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.log = Log(self.lines.put_nowait)
        self.events = ChildEvents(0.1, self.stopped.put_nowait)
        tasks = Tasks(self.errors.append)
        self.server = ForkServer(command(code), dict(os.environ), tasks, self.said.append)
        self.tasks = tasks

    async def ask(self, who: str = "x", log: Log | None = None, **inherited: int) -> ChildProcess:
        """Return a process that the server has forked."""
        environment = os.environ | {"WHO": who}
        forked = await self.server.fork("demo", environment, log or self.log, inherited)
        assert forked
        return forked

    async def fork(self, who: str = "x") -> ChildProcess:
        """Return a process that has said who it is."""
        forked = await self.ask(who)
        assert await self.lines.get() == f"{who} {os.getpid()} True"
        return forked


async def end(process: ChildProcess) -> None:
    """Kill a process that runs."""
    assert not process.end.done()
    process.kill()
    assert await process.end == "signal 9"


@asynccontextmanager
async def site(code: str = SERVE + "signal.pause()") -> AsyncIterator[Site]:
    """Yield a site that leaves neither processes nor descriptors."""
    children = psutil.Process().children(recursive=True)
    before = set(Path("/proc/self/fd").iterdir())
    one = Site(code)
    try:
        yield one
    finally:
        await one.server.close()
        await one.tasks.wait()
        one.log.close()
        one.events.close()
    assert one.errors == []
    assert psutil.Process().children(recursive=True) == children  # zombies count
    assert len(set(Path("/proc/self/fd").iterdir())) <= len(before)
