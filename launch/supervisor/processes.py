"""Processes of a pipeline by name: started, restarted and stopped, independent of the runner.

The supervisor decides (`Policy`); `Processes` carries out its decisions.
"""

import asyncio
import contextlib
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from penstock.launch.supervisor.output import NUM_LAST_LINES
from penstock.protocol.config import Config
from penstock.protocol.transport.context import Context

OnError = Callable[[BaseException], None]
GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class Tasks:
    """Starter of the supervisor's tasks, which holds tasks until they end."""

    def __init__(self, on_error: OnError) -> None:
        """Initialize; on_error: receives every exception that ends a task, except cancellation."""
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def wait(self) -> None:
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_error(error)


def traceback_lines(error: BaseException) -> list[str]:
    """Format an exception for a log."""
    return "".join(traceback.format_exception(error)).rstrip().splitlines()


class ManagedProcess(ABC):
    """Process with a name, across its restarts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0  # 0: not running
        self.last_pid = 0  # pid of the previous run
        self.node = ""  # name of the process's machine; empty with a single machine
        self.num_starts = 0
        self.started_at = 0.0  # by time.monotonic()
        self.end = ""  # reason for the last end: `exit code 1`
        self.is_restart_requested = False  # True if the next start does not follow a death
        # pid of a run killed by the watchdog because another process of its group was lost
        self.killed_with_group = 0
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.wanted = asyncio.Event()
        self.wanted.set()
        self.idle = asyncio.Event()  # neither running nor being started
        self.spawned = asyncio.Event()  # started, or not to be started
        self.has_started = asyncio.Event()  # a heartbeat has arrived since the start
        self.task: asyncio.Task[None]

    @abstractmethod
    async def spawn(self) -> None:
        """Start the process, and set `pid` and `node`. Raises OSError."""

    @abstractmethod
    async def wait(self) -> str:
        """Wait for the end of the process and return the reason, after all its lines."""

    @abstractmethod
    async def terminate(self) -> None:
        """Send SIGTERM, and SIGKILL after GRACE seconds."""

    @abstractmethod
    async def release(self) -> None:
        """Free resources shared by the runs; the process is not started again."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the running process."""

    @abstractmethod
    async def kill(self) -> bool:
        """Send SIGKILL to the running process; False if its machine is unreachable."""

    @abstractmethod
    async def vitals(self, pid: int) -> tuple[float, bool]:
        """Return `child_process.vitals` of the process with this pid."""

    def owns(self, pid: int) -> bool:
        """Return whether a pid belongs to the running process."""
        return pid == self.pid

    async def stop(self) -> None:
        """Stop the process, if reachable; no restart follows until the process is `wanted`."""
        self.wanted.clear()
        await self.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), GRACE)


class Policy(Protocol):
    """Decisions and reports about processes."""

    def may_spawn(self, process: ManagedProcess) -> bool:
        """Decide before every start or restart whether the process may run."""

    def spawned(self, process: ManagedProcess) -> None:
        """Handle the start of a process."""

    def exited(self, process: ManagedProcess) -> None:
        """Handle the end of a process."""

    def stopped(self, process: ManagedProcess) -> None:
        """Handle a process that was stopped (SIGSTOP) and did not continue."""

    def take_line(self, process: ManagedProcess, text: str) -> None:
        """Handle a line written by the process."""

    def say(self, text: str) -> None:
        """Handle a line for the log that belongs to no process."""


class Processes(ABC):
    """Container that starts, restarts and stops processes by name."""

    watchdog_context: Context  # context of the socket to which all processes connect

    def __init__(self, policy: Policy, tasks: Tasks) -> None:
        self.by_name: dict[str, ManagedProcess] = {}
        self._policy = policy
        self._tasks = tasks

    @property
    def context(self) -> Context:
        """Context of sockets that connect to processes."""
        return self.watchdog_context

    @abstractmethod
    def _make(self, name: str) -> ManagedProcess:
        """Return a process that has not been started."""

    async def add(self, names: list[str]) -> None:
        for name in names:
            process = self.by_name[name] = self._make(name)
            process.task = self._tasks.start(self._keep(process))
        await asyncio.sleep(0)

    @abstractmethod
    async def wait_spawned(self, names: Iterable[str]) -> None:
        """Wait until processes were started, if this takes only a moment."""

    async def remove(self, names: list[str]) -> None:
        # processes that do not run come first: they may wait for the places of running processes
        for does_run in (False, True):
            chosen = [name for name in names if bool(self.by_name[name].pid) == does_run]
            await self._each(chosen, self._remove)
        for name in names:
            del self.by_name[name]

    async def stop(self, names: Iterable[str]) -> None:
        await self._each(names, lambda process: process.stop())

    async def restart(self, names: Iterable[str]) -> None:
        for name in names:
            self.by_name[name].is_restart_requested = True
            self.by_name[name].wanted.set()
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self.remove(list(self.by_name))

    async def _keep(self, process: ManagedProcess) -> None:
        """Run a process, and restart it after every end, as long as the policy permits."""
        while await self._may_start(process):
            try:
                await process.spawn()
            except OSError as error:
                process.end, process.last_pid = str(error), 0
                continue
            process.started_at = time.monotonic()
            self._policy.spawned(process)
            process.spawned.set()
            process.end = await process.wait()
            process.spawned.clear()
            process.has_started.clear()
            process.last_pid, process.pid = process.pid, 0
            self._policy.exited(process)
        process.spawned.set()
        process.idle.set()

    async def _may_start(self, process: ManagedProcess) -> bool:
        process.idle.set()
        await process.wanted.wait()
        process.idle.clear()
        return self._policy.may_spawn(process)

    async def _remove(self, process: ManagedProcess) -> None:
        if process.pid:
            await process.stop()
        process.task.cancel()
        await process.release()

    async def _each(
        self, names: Iterable[str], run: Callable[[ManagedProcess], Coroutine[Any, Any, object]]
    ) -> None:
        await asyncio.gather(*(run(self.by_name[name]) for name in names))


# from the configuration, and the commands by kind of process
MakeProcesses = Callable[[Config, dict[str, str], Policy, Tasks], Processes]
