"""Heartbeats for tests, with real processes and sockets."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.launch.supervisor.child_process import vitals
from penstock.launch.supervisor.processes import ManagedProcess, Tasks
from penstock.launch.supervisor.watchdog import Watchdog
from penstock.protocol.config import Config, make_run_folder
from penstock.protocol.messages.supervisor import SupervisorHeartbeat
from penstock.protocol.transport.context import Context, endpoints

LONG = 3600.0
"""seconds; no test waits for them"""


class Known(ManagedProcess):
    """A process that a test has started."""

    signal = spawn = wait = terminate = release = None  # type: ignore[assignment]

    def __init__(self, name: str, child: Any) -> None:
        super().__init__(name)
        self.child, self.pid = child, child.pid

    async def kill(self) -> bool:
        self.child.kill()
        return True

    async def vitals(self, pid: int) -> tuple[float, bool]:
        return vitals(pid)


class Supervised:
    """Watchdog, what they write, and children that send none by themselves."""

    def __init__(self, config: Config) -> None:
        self.said: list[str] = []
        self.processes: dict[str, ManagedProcess] = {}
        self._context: Context = Context()
        self.errors: list[BaseException] = []
        self.tasks = Tasks(self.errors.append)
        self.watchdog = Watchdog(
            config, self.said.append, self.processes, self._context, self.tasks
        )
        self._sender = self._context.connect(zmq.PUSH, endpoints(config).supervisor)
        self.children: list[asyncio.subprocess.Process] = []

    async def child(self, name: str, code: str = "signal.pause()") -> asyncio.subprocess.Process:
        """Return a process of this name at the beginning of `code`."""
        code = f"import signal; print(flush=True)\n{code}"
        command = sys.executable, "-c", code
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert child.stdout
        assert await child.stdout.readline()
        self.children.append(child)
        process = self.processes[name] = Known(name, child)
        self.tasks.start(self._watch(process))
        return child

    async def _watch(self, process: Known) -> None:
        """Report its end as the supervisor does."""
        await process.child.wait()
        process.pid = 0
        self.watchdog.exited(process)

    def heartbeat(self, name: str, pid: int, *more: Any, **fields: Any) -> None:
        assert self._sender.send(SupervisorHeartbeat(name, pid, *more, **fields))

    async def close(self) -> None:
        self.watchdog.close()
        assert self.errors == []
        self._context.destroy(linger=0)
        for child in self.children:
            if child.returncode is None:
                child.kill()
            await child.wait()


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    @asynccontextmanager
    async def make(hang_timeout: float = LONG, step_timeout: float = LONG) -> AsyncIterator[Any]:
        config = Config(name="p", hang_timeout=hang_timeout, step_timeout=step_timeout)
        make_run_folder(config)
        one = Supervised(config)
        try:
            yield one
        finally:
            await one.close()

    return make
