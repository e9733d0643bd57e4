"""Processes of this machine: children of the supervisor."""

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count
from types import MappingProxyType

from penstock.launch.pipeline.procfile import kind_of, read_procfile
from penstock.launch.pipeline.run_folder import environment
from penstock.launch.supervisor.child_process import ChildEvents, ChildProcess, vitals
from penstock.launch.supervisor.fork_server import ForkServer
from penstock.launch.supervisor.memory_server import MemoryServer
from penstock.launch.supervisor.output import Log
from penstock.launch.supervisor.processes import GRACE, ManagedProcess, Policy, Processes
from penstock.launch.supervisor.tasks import Tasks
from penstock.protocol.config import Config
from penstock.protocol.transport.context import Context
from penstock.protocol.transport.process import (
    INCARNATION_VARIABLE,
    PROCESS_VARIABLE,
    SUPERVISOR_VARIABLE,
)
from penstock.protocol.transport.socket_pairs import MEMORY_VARIABLE, socket_pair

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
SERVE_FORKS = "python -P -m penstock.services"  # command of a fork server, without its services
# services of each fork server; only the worker imports torch
FORKED = (("gateway", "tokenizer", "scheduler", "detokenizer", "http"), ("worker",))
# of --hang-timeout: seconds after which a process that was stopped (SIGSTOP) is killed
STOPPED_SHARE = 1 / 100
KEEPERS = ("worker", "scheduler")  # kinds of processes with memory that outlives them


class LocalProcess(ManagedProcess):
    """One process of this machine; all its runs write to one log."""

    def __init__(
        self,
        name: str,
        command: str,
        environment: dict[str, str],
        incarnations: "count[int]",
        memory: MemoryServer | None = None,
        forks: tuple[ForkServer, str] | None = None,
    ) -> None:
        """memory: serves the process, if it may have memory that outlives it.

        forks: its fork server, and its service.
        """
        super().__init__(name)
        self._memory = memory
        self._forks = forks
        self._command = command
        self._environment = environment | {PROCESS_VARIABLE: name}
        self._incarnations = incarnations
        self.log: Log
        self._child: ChildProcess

    async def spawn(self) -> None:
        environment = self._environment | {INCARNATION_VARIABLE: str(next(self._incarnations))}
        pair = socket_pair() if self._memory else None
        if self._memory is None or pair is None:
            self._child = await self._start(environment, {})
        else:
            ours, theirs = pair
            with theirs:
                self._child = await self._start(environment, {MEMORY_VARIABLE: theirs.fileno()})
            self._memory.serve(ours, self._child.end)
        self.pid = self._child.pid

    async def _start(self, environment: dict[str, str], inherited: dict[str, int]) -> ChildProcess:
        if self._forks:
            fork_server, service = self._forks
            forked = await fork_server.fork(service, environment, self.log, inherited)
            if forked and not self.wanted.is_set():  # stopped meanwhile
                forked.kill()
            if forked:
                return forked
        return ChildProcess.start(self._command, environment, self.log, inherited)

    async def wait(self) -> str:
        return await asyncio.shield(self._child.end)

    async def terminate(self) -> None:
        if self.pid:
            await self._child.stop(GRACE)

    async def release(self) -> None:
        self.log.close()

    def signal(self, number: int) -> None:
        self._child.signal(number)

    async def kill(self) -> bool:
        self._child.kill()
        return True

    async def vitals(self, pid: int) -> tuple[float, bool]:
        return vitals(pid)

    def owns(self, pid: int) -> bool:
        """Return whether a pid is in the session of the process: a command may be a wrapper."""
        with contextlib.suppress(OSError):
            return bool(self.pid) and os.getsid(pid) == self.pid
        return False


class LocalProcesses(Processes):
    """`Processes` of this machine; needs the running event loop."""

    def __init__(
        self,
        config: Config,
        commands: dict[str, str],
        policy: Policy,
        tasks: Tasks,
        gpus: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """commands: by kind of process. gpus: CUDA_VISIBLE_DEVICES by the model of processes."""
        super().__init__(policy, tasks)
        self._gpus = gpus
        self.watchdog_context = Context()
        self._commands = commands
        self._environment = environment(config) | {SUPERVISOR_VARIABLE: str(os.getpid())}
        self._incarnations = count(1)
        packaged = read_procfile()
        # fork server and service by the command that they replace
        self._forks: dict[str, tuple[ForkServer, str]] = {}
        self._fork_servers = []
        for services in forked_services(config):
            command = " ".join((SERVE_FORKS, *services))
            fork_server = ForkServer(command, self._environment, tasks, policy.say)
            self._fork_servers.append(fork_server)
            self._forks |= {packaged[one]: (fork_server, one) for one in services}
        self._events = ChildEvents(config.hang_timeout * STOPPED_SHARE, self._on_stopped)
        self._memory = {
            one.prefix.rstrip("/"): MemoryServer(tasks, policy.say) for one in config.by_model()
        }

    def _make(self, name: str) -> LocalProcess:
        command = self._commands[kind_of(name)]
        model = name.rpartition("/")[0]
        memory = self._memory[model] if kind_of(name) in KEEPERS else None
        gpus = self._gpus.get(model)
        environment = self._environment | ({} if gpus is None else {GPUS_VARIABLE: gpus})
        forks = self._forks.get(command)
        process = LocalProcess(name, command, environment, self._incarnations, memory, forks)
        process.log = Log(partial(self._policy.take_line, process))
        return process

    async def wait_spawned(self, names: Iterable[str]) -> None:
        await self._each(names, lambda process: process.spawned.wait())

    def _on_stopped(self, pid: int) -> None:
        for fork_server in self._fork_servers:
            if fork_server.pid == pid:
                fork_server.kill()
        for process in self.by_name.values():
            if process.pid == pid:
                self._policy.stopped(process)

    async def close(self) -> None:
        await super().close()
        for fork_server in self._fork_servers:
            await fork_server.close()
        self._events.close()
        for memory in self._memory.values():
            memory.close()
        self.context.destroy(linger=0)


def forked_services(config: Config) -> list[list[str]]:
    """Return the services of each fork server that this pipeline needs."""
    if not hasattr(os, "pidfd_open"):
        return []
    return [[one for one in kinds if one != "http" or config.http] for kinds in FORKED]
