"""Processes of this machine, which circus runs.

circus spawns, stops (SIGTERM, and SIGKILL after a grace) and restarts; each process is a watcher
of its own, so that it keeps its name. What is ours: a death is seen by SIGCHLD instead of circus's
periodic check, and logs go through named pipes (circus closes its own before the last lines of a
dead process are read).
"""

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import zmq
from circus.watcher import Watcher
from tornado.ioloop import IOLoop

from penstock.launch.run_folder import environment
from penstock.launch.supervisor.child import GRACE, end_of, kind_of
from penstock.launch.supervisor.logs import Log
from penstock.launch.supervisor.processes import Policy, Running
from penstock.launch.supervisor.procfile import shell_line
from penstock.launch.supervisor.watchdog import LocalHost
from penstock.protocol.config import Config
from penstock.protocol.transport.incarnation import INCARNATION_VARIABLE
from penstock.protocol.transport.process import PROCESS_VARIABLE, SUPERVISOR_VARIABLE


class CircusProcesses:
    """`Processes` for one machine; it needs the running event loop of the main thread."""

    def __init__(
        self, config: Config, commands: dict[str, str], policy: Policy, arbiter: Any
    ) -> None:
        """commands: of each kind of process."""
        self.host = LocalHost()
        self.context: zmq.Context[Any] = zmq.Context()
        self.pulses_context = self.context
        self._config = config
        self._commands = commands
        self._policy = policy
        self._arbiter = arbiter
        self._logs: dict[str, Log] = {}
        self._incarnations = count(1)
        self._circus = asyncio.Lock()  # circus refuses a command while another one runs
        self._death = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._death.set)

    async def add(self, names: list[str]) -> None:
        async with self._circus:
            for name in names:
                self._arbiter.add_watcher(**self._watcher(name))
            await self._arbiter.start_watchers(self._watchers(names))

    async def remove(self, names: list[str]) -> None:
        async with self._circus:
            for name in names:
                await self._arbiter.rm_watcher(name)
                self._logs.pop(name).close()

    async def stop(self, names: list[str]) -> None:
        async with self._circus:
            await self._arbiter.stop_watchers(self._watchers(names))

    async def start(self, names: list[str]) -> None:
        async with self._circus:
            await self._arbiter.start_watchers(self._watchers(names))

    async def keep(self) -> None:
        while True:
            await self._death.wait()
            self._death.clear()
            async with self._circus:
                await self._arbiter.manage_watchers()

    def running(self) -> Iterator[Running]:
        for name, process in self._processes():
            try:
                yield Running(name, process.pid, "", process.age())
            except psutil.NoSuchProcess:  # it has just ended
                continue

    def signal(self, name: str, pid: int, number: int) -> None:
        for its_name, process in self._processes():
            if (its_name, process.pid) == (name, pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    async def close(self) -> None:
        async with self._circus:
            await self._arbiter.stop_watchers()
        for log in self._logs.values():
            log.close()
        self.context.destroy(linger=0)

    def _processes(self) -> Iterator[tuple[str, Any]]:
        for watcher in self._arbiter.watchers:
            for process in watcher.processes.values():
                yield watcher.name, process

    def _watchers(self, names: list[str]) -> Callable[..., list[Watcher]]:
        """Which of its watchers circus is to start or to stop, as it wants to be told."""
        return lambda **_: [one for one in self._arbiter.watchers if one.name in names]

    def _watcher(self, name: str) -> dict[str, Any]:
        """The arguments of a circus Watcher for one process."""
        path = self._config.run_folder / f"{name}.log"
        self._logs[name] = Log(path, partial(self._policy.line, name))
        command = shell_line(self._commands[kind_of(name)])
        return {
            "name": name,
            "cmd": "sh",
            "args": ["-c", f"{command} >{shlex.quote(str(path))} 2>&1"],
            "env": environment(self._config)
            | {PROCESS_VARIABLE: name, SUPERVISOR_VARIABLE: str(os.getpid())},
            "working_dir": str(Path.cwd()),
            "graceful_timeout": GRACE,
            "hooks": {
                "before_spawn": (self._may_spawn, False),
                "after_spawn": (self._spawned, False),
                "after_reap": (self._reaped, True),
            },
            "loop": IOLoop.current(),
        }

    def _may_spawn(self, watcher: Watcher, **_: Any) -> bool:
        watcher.env[INCARNATION_VARIABLE] = str(next(self._incarnations))
        if not self._policy.may_spawn(watcher.name):
            return False
        self._logs[watcher.name].restore()
        return True

    def _spawned(self, watcher: Watcher, pid: int, **_: Any) -> bool:
        self._policy.spawned(watcher.name, pid)
        return True

    def _reaped(self, watcher: Watcher, exit_code: int | None = None, **_: Any) -> None:
        self._logs[watcher.name].drain()
        self._policy.reaped(watcher.name, end_of(exit_code))
