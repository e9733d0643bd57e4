"""Processes of a pipeline by their names: started, restarted and stopped, whatever runs them.

The supervisor decides (`Policy`); `Processes` carries out.
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
    """The one way in which the supervisor starts tasks: it holds them until they end."""

    def __init__(self, on_error: OnError) -> None:
        """on_error: takes every exception that ends a task, except its cancellation."""
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
    """One process by its name, over its restarts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0  # 0: it does not run
        self.last_pid = 0  # of the run that ended last
        self.node = ""  # name of its machine; empty where there is only this one
        self.num_starts = 0
        self.started_at = 0.0  # by time.monotonic()
        self.end = ""  # reason of its last end: `exit code 1`
        self.is_restart_requested = False  # no death precedes its next start
        # pid that the watchdog killed because another process of its group was lost
        self.killed_with_group = 0
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.wanted = asyncio.Event()
        self.wanted.set()
        self.idle = asyncio.Event()  # it neither runs nor is being started
        self.spawned = asyncio.Event()  # it was started, or is not to be started
        self.has_started = asyncio.Event()  # it has sent a heartbeat since then
        self.task: asyncio.Task[None]

    @abstractmethod
    async def spawn(self) -> None:
        """Start it, and set `pid` and `node`. Raises OSError."""

    @abstractmethod
    async def wait(self) -> str:
        """Wait for its end and return the reason; all its lines come before."""

    @abstractmethod
    async def terminate(self) -> None:
        """Send SIGTERM, and SIGKILL after GRACE seconds."""

    @abstractmethod
    async def release(self) -> None:
        """Free what its runs shared; it is not started again."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process that runs."""

    @abstractmethod
    async def kill(self) -> bool:
        """Send SIGKILL to the process that runs; False if its machine is unreachable."""

    @abstractmethod
    async def vitals(self, pid: int) -> tuple[float, bool]:
        """Return `child_process.vitals` of the process with this pid."""

    def owns(self, pid: int) -> bool:
        """Return whether a pid is of the process that runs."""
        return pid == self.pid

    async def stop(self) -> None:
        """End it, if it can be reached; it is not restarted until it is `wanted`."""
        self.wanted.clear()
        await self.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), GRACE)


class Policy(Protocol):
    """Decisions about processes, and reports of them."""

    def may_spawn(self, process: ManagedProcess) -> bool:
        """Decide before every start and restart."""

    def spawned(self, process: ManagedProcess) -> None:
        """Take note of a start."""

    def exited(self, process: ManagedProcess) -> None:
        """Take note of an end."""

    def stopped(self, process: ManagedProcess) -> None:
        """Take note of a process that was stopped (SIGSTOP) and did not continue."""

    def take_line(self, process: ManagedProcess, text: str) -> None:
        """Take a line that the process wrote."""

    def say(self, text: str) -> None:
        """Take a line for the log that belongs to no process."""


class Processes(ABC):
    """Starts, restarts and stops processes, each by its name."""

    watchdog_context: Context  # of the socket that all processes connect to

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
        """Return a process that is not started yet."""

    async def add(self, names: list[str]) -> None:
        for name in names:
            process = self.by_name[name] = self._make(name)
            process.task = self._tasks.start(self._keep(process))
        await asyncio.sleep(0)

    @abstractmethod
    async def wait_spawned(self, names: Iterable[str]) -> None:
        """Wait until processes were started, where this takes a moment only."""

    async def remove(self, names: list[str]) -> None:
        # first what does not run: it may wait for the place of what does
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
        """Run a process, and again after every end, as long as the policy permits."""
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
