"""Processes of this machine: children of the supervisor."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import psutil

from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.pipeline.run_folder import environment
from penstock.launch.supervisor.child import GRACE
from penstock.launch.supervisor.child_process import ChildProcess, Vitals
from penstock.launch.supervisor.logs import Log
from penstock.launch.supervisor.processes import KeptProcess, Policy, Processes
from penstock.protocol.config import Config
from penstock.protocol.transport.context import Context
from penstock.protocol.transport.process import (
    INCARNATION_VARIABLE,
    PROCESS_VARIABLE,
    SUPERVISOR_VARIABLE,
)


class LocalProcess(KeptProcess):
    """One process of this machine; all its runs write to one log."""

    def __init__(
        self, name: str, command: str, config: Config, incarnations: Iterator[int], policy: Policy
    ) -> None:
        super().__init__(name)
        self._command = command
        self._environment = environment(config) | {
            PROCESS_VARIABLE: name,
            SUPERVISOR_VARIABLE: str(os.getpid()),
        }
        self._incarnations = incarnations
        self._log = Log(partial(policy.line, name))
        self._child: ChildProcess

    async def spawn(self) -> None:
        number = {INCARNATION_VARIABLE: str(next(self._incarnations))}
        self._child = ChildProcess(self._command, self._environment | number, self._log)
        self.pid = self._child.pid

    async def wait(self) -> str:
        return await asyncio.shield(self._child.end)

    async def terminate(self) -> None:
        if self.pid:
            await self._child.stop(GRACE)

    async def release(self) -> None:
        self._log.close()

    def signal(self, number: int) -> None:
        self._child.signal(number)


class LocalProcesses(Processes[LocalProcess]):
    """`Processes` of this machine; needs the running event loop."""

    def __init__(self, config: Config, commands: dict[str, str], policy: Policy) -> None:
        """commands: by kind of process."""
        super().__init__(policy)
        self.host = LocalHost()
        self.watchdog_context = Context()
        self._config = config
        self._commands = commands
        self._incarnations = count(1)

    @property
    def context(self) -> Context:
        return self.watchdog_context

    def _make(self, name: str) -> LocalProcess:
        command = self._commands[kind_of(name)]
        return LocalProcess(name, command, self._config, self._incarnations, self._policy)

    async def close(self) -> None:
        await super().close()
        self.context.destroy(linger=0)


class LocalHost:
    """The `Host` that this machine is: only the supervisor's own descendants count."""

    def watch(self, _name: str, pid: int, on_end: Callable[[], None]) -> "WatchedPid | None":
        """As `Host.watch`."""
        try:
            parents = psutil.Process(pid).parents()
            if os.getpid() not in (parent.pid for parent in parents):
                return None
            return WatchedPid(pid, os.pidfd_open(pid), on_end)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return None


class WatchedPid:
    """A `Watched` process of this machine, by its pidfd."""

    def __init__(self, pid: int, pidfd: int, on_end: Callable[[], None]) -> None:
        self._vitals = Vitals(pid)
        self._pidfd = pidfd
        self._is_forgotten = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, on_end)

    async def works(self, since: float) -> bool:
        """As `Watched.works`."""
        return self._vitals.works(since)

    async def kill(self) -> bool:
        """As `Watched.kill`; without effect on a process that is dead, or forgotten."""
        if not self._is_forgotten:  # the descriptor's number may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return True

    def forget(self) -> None:
        """As `Watched.forget`."""
        self._is_forgotten = True
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
