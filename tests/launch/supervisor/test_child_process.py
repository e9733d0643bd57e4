"""Children of which the kernel gives no pidfd: real processes."""

import asyncio
import errno
import os
import sys
from types import SimpleNamespace

import pytest

from penstock.launch.supervisor.child_process import ChildProcess
from penstock.launch.supervisor.output import Log
from penstock.protocol.transport import process as process_exit


def refuse(_pid: int) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_the_exit_code_of_an_adopted_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_exit, "os", SimpleNamespace(**vars(os) | {"pidfd_open": refuse}))

    async def test() -> None:
        log = Log(lambda _: None)
        command = [sys.executable, "-c", "raise SystemExit(3)"]
        pid = os.posix_spawn(sys.executable, command, os.environ)
        assert await ChildProcess.adopt(pid, log).end == "exit code 3"
        log.close()

    asyncio.run(test())
