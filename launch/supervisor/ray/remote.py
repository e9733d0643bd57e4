"""One process on a node of a Ray cluster, as the supervisor knows it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.supervisor.child import GRACE
from penstock.launch.supervisor.processes import KeptProcess
from penstock.launch.supervisor.ray.actor import LOST, Started

PING_TIMEOUT = 1.0
"""seconds within which an actor that can be reached answers"""


class RemoteProcess(KeptProcess):
    """One process, and its actor."""

    def __init__(
        self, name: str, incarnations: Iterator[int], on_line: Callable[[str], None]
    ) -> None:
        super().__init__(name)
        self._on_line = on_line
        self.actor: Any = None
        self._incarnations = incarnations
        self._number = 0

    async def ask(self, answer: Any, timeout: float) -> bool:
        """Wait for an answer of the actor; False if it is unreachable."""
        with contextlib.suppress(TimeoutError, RayActorError):
            await asyncio.wait_for(answer, timeout)
            return True
        return False

    async def spawn(self) -> None:
        """As `KeptProcess.spawn`, once Ray has the actor somewhere. Raises LaunchError, too."""
        started: Started | None = None
        try:
            while started is None:
                actor_id = await self.actor.id.remote()
                self._number = next(self._incarnations)
                started = await self.actor.start.remote(actor_id, self._number)
        except RayActorError as error:
            raise LaunchError(f"Ray has no place for {self.name} any more: {error}") from error
        self.pid, self.node = started.pid, started.node
        if not self.wanted.is_set():  # `stop` came while it was started
            self.actor.stop.remote(GRACE)

    async def wait(self) -> str:
        while True:
            try:
                lines, end = await self.actor.follow.remote(self._number)
            except RayActorError:
                end, lines = LOST, []
            for line in lines:
                self._on_line(line)
            if end is not None:
                return f"{end} on {self.node}" if end == LOST else str(end)

    async def terminate(self) -> None:
        if self.actor:
            await self.ask(self.actor.stop.remote(GRACE), 2 * GRACE + PING_TIMEOUT)

    async def release(self) -> None:
        if self.actor:
            await self.ask(self.actor.leave.remote(), GRACE if self.pid else PING_TIMEOUT)
            ray.kill(self.actor)

    def signal(self, number: int) -> None:
        self.actor.signal.remote(self.pid, number)


class RemoteWatched:
    """As `processes.Watched`: one run of a process."""

    def __init__(self, process: RemoteProcess, on_end: Callable[[], None]) -> None:
        self._process, self._pid = process, process.pid
        process.on_end = on_end

    async def works(self, since: float) -> bool:
        """As `Watched.works`: its own node sees that."""
        with contextlib.suppress(TimeoutError, RayActorError):
            answer = self._process.actor.works.remote(self._pid, since)
            return bool(await asyncio.wait_for(answer, PING_TIMEOUT))
        return False

    async def kill(self) -> bool:
        if self._process.pid != self._pid:
            return True
        if not await self._process.ask(self._process.actor.ping.remote(), PING_TIMEOUT):
            return False
        self._process.actor.signal.remote(self._pid, signal.SIGKILL)
        return True

    def forget(self) -> None:
        if self._process.pid == self._pid:
            self._process.on_end = lambda: None
