"""Processes on this machine: children of the supervisor."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.launch.pipeline.procfile import kind_of, read_procfile
from penstock.launch.pipeline.run_folder import environment
from penstock.launch.supervisor.child_process import (
    ChildEvents,
    ChildProcess,
    adopting,
    describe_exit,
    vitals,
)
from penstock.launch.supervisor.output import Log
from penstock.launch.supervisor.processes import GRACE, ManagedProcess, Policy, Processes, Tasks
from penstock.protocol.config import Config
from penstock.protocol.messages.supervisor import (
    DropMemory,
    Forked,
    ForkRequest,
    KeepMemory,
    MemoryReply,
    TakeMemory,
    ToMemoryServer,
)
from penstock.protocol.transport.context import Context
from penstock.protocol.transport.process import (
    INCARNATION_VARIABLE,
    PROCESS_VARIABLE,
    SUPERVISOR_VARIABLE,
)
from penstock.protocol.transport.socket_pairs import (
    FORKS_VARIABLE,
    MAX_FORK_MESSAGE,
    MAX_MEMORY_MESSAGE,
    MEMORY_VARIABLE,
    socket_pair,
)

# seconds within which the last user of memory must have exited; otherwise the memory is dropped
MAX_EXIT_SECONDS = 5.0
# reasons for exits of processes that wrote no invalid data before; a shell reports crashes as 128 +
# N
ORDERLY = ("exit code 0", "exit code 1", "signal 9", "signal 15")
MAX_FORK_SECONDS = 5.0  # seconds within which a ready fork server must reply
KILLED = describe_exit(-signal.SIGKILL)
MAX_KILLS = 5
# NumPy would start threads when it is imported; a process with threads should not fork
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
SERVE_FORKS = "python -P -m penstock.services"  # command of a fork server, without its services
# services of each fork server; only the worker imports torch
FORKED = (("gateway", "tokenizer", "scheduler", "detokenizer", "http"), ("worker",))
# share of --hang-timeout after which a stopped process (SIGSTOP) is killed
STOPPED_SHARE = 1 / 100
KEEPERS = ("worker", "scheduler")  # kinds of processes with memory that outlives them


class _Peer(NamedTuple):
    socket: socket.socket
    end: "asyncio.Future[str]"  # how the process ended


class _Region(NamedTuple):
    manifest: bytes
    descriptor: int
    user: "asyncio.Future[str]"  # end of the process that uses the memory, or used it last


class MemoryServer:
    """Server of named persistent memory, in the running event loop."""

    def __init__(self, tasks: Tasks, say: Callable[[str], None]) -> None:
        """Initialize; tasks: reports exceptions; say: receives lines for the log."""
        self._tasks = tasks
        self._say = say
        self._regions: dict[str, _Region] = {}
        self._peers: set[_Peer] = set()

    def serve(self, connection: socket.socket, end: "asyncio.Future[str]") -> None:
        """Serve a process over its socket pair; end: completes when the process ends."""
        peer = _Peer(connection, end)
        self._peers.add(peer)
        asyncio.get_running_loop().add_reader(connection, self._receive, peer)

    def close(self) -> None:
        for peer in list(self._peers):
            self._leave(peer)
        for name in list(self._regions):
            self._drop(name)

    def _receive(self, peer: _Peer) -> None:
        descriptors: list[int] = []
        try:
            flags = socket.MSG_CMSG_CLOEXEC
            data, descriptors, _, _ = socket.recv_fds(peer.socket, MAX_MEMORY_MESSAGE, 1, flags)
            message = msgspec.msgpack.decode(data, type=ToMemoryServer) if data else None
        except (OSError, msgspec.DecodeError):
            message = None
        match message:
            case TakeMemory(name, shares=True):
                self._reply(peer, self._regions.get(name))
            case TakeMemory(name):
                self._tasks.start(self._pass_on(name, peer))
            case KeepMemory(name, manifest) if descriptors:
                self._drop(name)
                self._regions[name] = _Region(manifest, descriptors.pop(), peer.end)
                self._reply(peer)
            case DropMemory(name):
                self._drop(name)
                self._reply(peer)
            case _:
                self._leave(peer)
        for descriptor in descriptors:  # such messages may not have descriptors
            os.close(descriptor)

    async def _pass_on(self, name: str, peer: _Peer) -> None:
        """Reply with the memory if its last user has exited and can't have damaged it."""
        while (region := self._regions.get(name)) and region.user is not peer.end:
            await asyncio.wait([region.user], timeout=MAX_EXIT_SECONDS)
            if self._regions.get(name) is not region:
                continue  # dropped, or given to another process
            how = region.user.result() if region.user.done() else "no exit"
            if how in ORDERLY:
                self._regions[name] = region._replace(user=peer.end)
            else:
                self._say(f"memory {name} is not used again: its process ended with {how}")
                self._drop(name)
        self._reply(peer, region)

    def _reply(self, peer: _Peer, region: _Region | None = None) -> None:
        """Reply, with memory if there is memory to pass on."""
        reply = MemoryReply(region.manifest if region else b"")
        descriptors = [region.descriptor] if region else []
        try:
            socket.send_fds(peer.socket, [msgspec.msgpack.encode(reply)], descriptors)
        except OSError:  # the process has exited
            self._leave(peer)

    def _drop(self, name: str) -> None:
        if region := self._regions.pop(name, None):
            os.close(region.descriptor)

    def _leave(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            asyncio.get_running_loop().remove_reader(peer.socket)
            peer.socket.close()


class ForkServer:
    """Fork server of some services, which is restarted when it dies; in the running event loop."""

    def __init__(
        self, command: str, environment: Mapping[str, str], tasks: Tasks, say: Callable[[str], None]
    ) -> None:
        """Prepare the fork server, which starts at the first `fork`.

        command: command of the fork server. environment: shared by the processes. tasks: reports
        exceptions. say: receives lines for the log.
        """
        self._command = command
        self._environment = {**environment, **SINGLE_THREADED}
        self._tasks = tasks
        self._say = say
        self._log: Log
        self._turn = asyncio.Lock()
        self._child: ChildProcess | None = None
        self._socket: socket.socket
        self._is_ready = self._is_useless = False

    @property
    def pid(self) -> int:
        return self._child.pid if self._child and not self._child.end.done() else 0

    async def fork(
        self, service: str, environment: Mapping[str, str], log: Log, descriptors: Mapping[str, int]
    ) -> ChildProcess | None:
        """Return a process like `ChildProcess.start`; None if it must be started by that method."""
        # a cancelled caller closes its own descriptors
        numbers = [os.dup(number) for number in (log.writer, *descriptors.values())]
        changes = dict(environment.items() - self._environment.items())
        request = ForkRequest(service, changes, list(descriptors))
        asking = asyncio.ensure_future(self._fork(request, numbers))
        try:
            pid = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_kill_forked)
            raise
        return ChildProcess.adopt(pid, log) if pid else None

    def kill(self) -> None:
        if self._child:
            self._child.kill()

    async def close(self) -> None:
        self._is_useless = True
        self.kill()
        if self._child:
            await asyncio.wait([self._child.end])

    async def _fork(self, request: ForkRequest, descriptors: list[int]) -> int:
        """Close the descriptors and return the pid of a forked process, or 0."""
        try:
            async with self._turn:
                return await self._fork_in_turn(request, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _fork_in_turn(self, request: ForkRequest, descriptors: list[int]) -> int:
        if self._child is None and not self._is_useless:
            self._log = Log(lambda line: self._say(f"fork server: {line}"))
            self._start()
            self._tasks.start(self._keep())
        if self._is_useless or not (self._is_ready or await self._receive()):
            return 0
        self._is_ready = True
        reply = None
        try:
            with adopting():
                socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], descriptors)
                async with asyncio.timeout(MAX_FORK_SECONDS):
                    reply = await self._receive()
        except (OSError, TimeoutError) as error:
            self._say(f"fork server: {str(error) or 'no reply'}")
        if reply is None:
            self.kill()
        return reply.pid if reply else 0

    async def _receive(self) -> Forked | None:
        """Return the next reply, or None when the fork server has exited."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            if data := await loop.sock_recv(self._socket, MAX_FORK_MESSAGE):
                return msgspec.msgpack.decode(data, type=Forked)
        return None

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._is_ready = False
        with theirs:
            descriptors = {FORKS_VARIABLE: theirs.fileno()}
            start = ChildProcess.start
            self._child = start(self._command, self._environment, self._log, descriptors)

    async def _keep(self) -> None:
        """Start a new fork server when the old one has died.

        No fork server is started if its imports fail, or if it was killed MAX_KILLS times in a row
        before it was ready.
        """
        num_kills = 0
        while self._child and not self._is_useless:
            await asyncio.wait([self._child.end])
            async with self._turn:
                # it may have become ready without a request
                was_ready = self._is_ready or await self._receive() is not None
                self._socket.close()
                how = self._child.end.result()
                if self._is_useless:
                    break
                num_kills = 0 if was_ready else num_kills + 1
                if was_ready or (how == KILLED and num_kills < MAX_KILLS):
                    self._say(f"the fork server died with {how}; restarted")
                    self._start()
                else:
                    self._say(f"the fork server died with {how}; processes start without it")
                    self._is_useless = True
        self._log.close()


def _kill_forked(asking: "asyncio.Future[int]") -> None:
    """Kill a process whose caller has stopped waiting."""
    if not asking.cancelled() and not asking.exception() and (pid := asking.result()):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class LocalProcess(ManagedProcess):
    """Process on this machine; all its runs write to one log."""

    def __init__(
        self,
        name: str,
        command: str,
        environment: dict[str, str],
        incarnations: "count[int]",
        memory: MemoryServer | None = None,
        forks: tuple[ForkServer, str] | None = None,
    ) -> None:
        """Initialize; memory: serves the process if its memory may outlive it.

        forks: the process's fork server, and its service.
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
        child = None
        if self._forks:
            fork_server, service = self._forks
            child = await fork_server.fork(service, environment, self.log, inherited)
        child = child or ChildProcess.start(self._command, environment, self.log, inherited)
        if not self.wanted.is_set():  # the process was stopped while the fork server was asked
            child.kill()
        return child

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
        """Return whether a pid is in the process's session, since a command may be a wrapper."""
        with contextlib.suppress(OSError):
            return bool(self.pid) and os.getsid(pid) == self.pid
        return False


class LocalProcesses(Processes):
    """Implementation of `Processes` for this machine; requires a running event loop."""

    def __init__(
        self,
        config: Config,
        commands: dict[str, str],
        policy: Policy,
        tasks: Tasks,
        gpus: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Initialize; commands: by kind of process; gpus: CUDA_VISIBLE_DEVICES by model."""
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
            self._forks |= {packaged[service]: (fork_server, service) for service in services}
        self._events = ChildEvents(config.hang_timeout * STOPPED_SHARE, self._on_stopped)
        self._memory = {
            model.prefix.rstrip("/"): MemoryServer(tasks, policy.say) for model in config.by_model()
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
    return [[kind for kind in kinds if kind != "http" or config.http] for kinds in FORKED]
