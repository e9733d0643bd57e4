"""The supervisor's processes, whatever runs them: this machine, or a Ray cluster.

The supervisor decides (`Policy`); `Processes` starts, stops and restarts, and reports.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from penstock.launch.supervisor.child import GRACE
from penstock.launch.supervisor.tasks import Tasks
from penstock.protocol.transport.context import Context


class Running(NamedTuple):
    """A process that runs."""

    name: str
    pid: int
    node: str
    """name of its machine; empty where there is only this one"""
    age: float
    """seconds"""


class Policy(Protocol):
    """Decisions about processes and reports of them, each process known by its name."""

    def may_spawn(self, name: str) -> bool:
        """Decide before every start and restart."""

    def spawned(self, name: str, pid: int, node: str = "") -> None:
        """Take note of a start; node: as in `Running`."""

    def line(self, name: str, text: str) -> None:
        """Take a line that the process wrote. All lines come before its end."""

    def reaped(self, name: str, end: str) -> None:
        """Take note of an end: `exit code 1`."""

    def say(self, text: str) -> None:
        """Take a line for the log that belongs to no process."""


class Watched(Protocol):
    """One run of a process, for the watchdog."""

    async def works(self, since: float) -> bool:
        """Return whether it used CPU time since the last call, or is about to.

        since: CPU seconds since its start that do not count. False if it is stopped or unreachable.
        """

    async def kill(self) -> bool:
        """Send SIGKILL; False if its machine is unreachable."""

    def forget(self) -> None:
        """Do not report its end."""


class Host(Protocol):
    """Place where processes can be watched and killed."""

    def watch(self, name: str, pid: int, on_end: Callable[[], None]) -> Watched | None:
        """Call `on_end` when the process ends; None if it is not one of the supervisor's."""


class KeptProcess(ABC):
    """One process by its name, over its restarts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        """0: it does not run"""
        self.node = ""
        self.since = 0.0
        self.on_end: Callable[[], None] = lambda: None
        self.wanted = asyncio.Event()
        self.wanted.set()
        self.idle = asyncio.Event()
        """it neither runs nor is being started"""
        self.task: asyncio.Task[None]

    @abstractmethod
    async def spawn(self) -> None:
        """Start it, and set `pid` and `node`. Raises OSError."""

    @abstractmethod
    async def wait(self) -> str:
        """Wait for its end and return how it ended."""

    @abstractmethod
    async def terminate(self) -> None:
        """Send SIGTERM, and SIGKILL after GRACE seconds."""

    @abstractmethod
    async def release(self) -> None:
        """Free what its runs shared; it is not started again."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process that runs."""

    async def stop(self) -> None:
        """End it, if it can be reached; it is not restarted until it is `wanted`."""
        self.wanted.clear()
        await self.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), GRACE)


Kept = TypeVar("Kept", bound=KeptProcess)


class Processes(ABC, Generic[Kept]):
    """Starts, restarts and stops processes, each by its name."""

    host: Host
    watchdog_context: Context
    """of the socket that all processes connect to"""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._processes: dict[str, Kept] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = Tasks(self._fail)

    @property
    @abstractmethod
    def context(self) -> Context:
        """Context of sockets that connect to processes."""

    @abstractmethod
    def _make(self, name: str) -> Kept:
        """Return a process that is not started yet."""

    async def add(self, names: list[str]) -> None:
        """Start new processes."""
        for name in names:
            process = self._processes[name] = self._make(name)
            process.task = self._tasks.start(self._keep(process))
        await asyncio.sleep(0)  # processes of this machine are spawned within

    async def remove(self, names: list[str]) -> None:
        """Stop processes for good."""
        # first what does not run: it may wait for the place of what does
        for does_run in (False, True):
            chosen = [name for name in names if bool(self._processes[name].pid) == does_run]
            await self._each(chosen, self._remove)
        for name in names:
            del self._processes[name]

    async def stop(self, names: list[str]) -> None:
        """Stop processes until `start`."""
        await self._each(names, lambda process: process.stop())

    async def start(self, names: list[str]) -> None:
        """Start processes again after `stop`."""
        for name in names:
            self._processes[name].wanted.set()
        await asyncio.sleep(0)  # as in `add`

    async def keep(self) -> None:
        """Wait until the processes can't be kept running, and raise the reason."""
        await self._failed

    def running(self) -> Iterator[Running]:
        """Yield the processes that run now."""
        now = time.monotonic()
        for one in self._processes.values():
            if one.pid:
                yield Running(one.name, one.pid, one.node, now - one.since)

    def signal(self, name: str, pid: int, number: int) -> None:
        """Send a signal; without effect where the process with this pid has ended."""
        process = self._processes.get(name)
        if process and process.pid == pid:
            process.signal(number)

    async def close(self) -> None:
        """Stop all processes."""
        await self.remove(list(self._processes))

    async def _keep(self, process: Kept) -> None:
        """Run a process, and again after every end, as long as the policy permits."""
        while await self._may_start(process):
            try:
                await process.spawn()
            except OSError as error:
                self._policy.reaped(process.name, str(error))
                continue
            process.since = time.monotonic()
            self._policy.spawned(process.name, process.pid, process.node)
            end = await process.wait()
            process.pid = 0
            self._policy.reaped(process.name, end)
            process.on_end()
        process.idle.set()

    async def _may_start(self, process: Kept) -> bool:
        process.idle.set()
        await process.wanted.wait()
        process.idle.clear()
        return self._policy.may_spawn(process.name)

    async def _remove(self, process: Kept) -> None:
        if process.pid:
            await process.stop()
        process.task.cancel()
        await process.release()

    async def _each(
        self, names: Iterable[str], run: Callable[[Kept], Coroutine[Any, Any, None]]
    ) -> None:
        await asyncio.gather(*(run(self._processes[name]) for name in names))

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
