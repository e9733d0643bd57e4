"""Fork server: a process that has imported services, and from which their processes are forked.

So imports cost time and memory once. It holds no state. While there is none, processes start by
their commands.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping

import msgspec

from penstock.launch.supervisor.child_process import ChildProcess, adopting, describe_exit
from penstock.launch.supervisor.output import Log
from penstock.launch.supervisor.tasks import Tasks
from penstock.protocol.messages.supervisor import Forked, ForkRequest
from penstock.protocol.transport.socket_pairs import FORKS_VARIABLE, MAX_FORK_MESSAGE

MAX_FORK_SECONDS = 5.0  # in which a fork server that is ready must reply
KILLED = describe_exit(-signal.SIGKILL)
MAX_KILLS = 5
# NumPy would start threads when it is imported, and a process with threads should not fork
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}


class ForkServer:
    """Fork server of some services, restarted when it dies; in the running event loop."""

    def __init__(
        self, command: str, environment: Mapping[str, str], tasks: Tasks, say: Callable[[str], None]
    ) -> None:
        """Prepare it; the first `fork` starts it.

        command: of the fork server. environment: the processes share it. tasks: reports
        exceptions. say: takes a line for the log.
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
        """Return a process as `ChildProcess.start` does; None: it must be started that way."""
        # the caller closes its own when it is cancelled
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
        """Return the next reply; None when the fork server has exited."""
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
        """Start another fork server when one has died.

        If its imports fail, or it was killed MAX_KILLS times in a row before it was ready, there is
        none.
        """
        num_kills = 0
        while self._child and not self._is_useless:
            await asyncio.wait([self._child.end])
            async with self._turn:
                # it may have been ready without a request
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
    """Kill a process for which nobody waits any more."""
    if not asking.cancelled() and not asking.exception() and (pid := asking.result()):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
