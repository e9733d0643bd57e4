"""One process on a node of a Ray cluster, as the supervisor knows it."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.supervisor.processes import GRACE, ManagedProcess
from penstock.launch.supervisor.ray.actor import LOST, Started

PING_TIMEOUT = 1.0
"""seconds within which an actor that can be reached answers"""


class RemoteProcess(ManagedProcess):
    """One process, and its actor."""

    def __init__(
        self,
        name: str,
        incarnations: Iterator[int],
        make_actor: Callable[[str], Awaitable[Any]],
        on_line: Callable[[ManagedProcess, str], None],
    ) -> None:
        """make_actor: makes the actor of a name, once the cluster has room for it."""
        super().__init__(name)
        self._actor: Any = None
        self._incarnations = incarnations
        self._make_actor = make_actor
        self._on_line = on_line
        self._number = 0

    async def spawn(self) -> None:
        """Spawn the process once Ray has placed its actor. Raises LaunchError, too."""
        self._actor = self._actor or await self._make_actor(self.name)
        started: Started | str | None = None
        try:
            while started is None:
                actor_id = await self._actor.id.remote()
                self._number = next(self._incarnations)
                started = await self._actor.start.remote(actor_id, self._number)
        except RayActorError as error:
            raise LaunchError(f"Ray has no place for {self.name} any more: {error}") from error
        if isinstance(started, str):
            raise OSError(started)
        self.pid, self.node = started.pid, started.node
        if not self.wanted.is_set():  # `stop` came while it was started
            self._actor.stop.remote(GRACE)

    async def wait(self) -> str:
        while True:
            try:
                lines, end = await self._actor.follow.remote(self._number)
            except RayActorError:
                end, lines = LOST, []
            for line in lines:
                self._on_line(self, line)
            if end is not None:
                return f"{end} on {self.node}" if end == LOST else str(end)

    async def terminate(self) -> None:
        if self._actor:
            await _reply(self._actor.stop.remote(GRACE), 2 * GRACE + PING_TIMEOUT)

    async def release(self) -> None:
        if self._actor:
            await _reply(self._actor.leave.remote(), GRACE if self.pid else PING_TIMEOUT)
            ray.kill(self._actor)

    def signal(self, number: int) -> None:
        self._actor.signal.remote(self.pid, number)

    async def kill(self) -> bool:
        pid = self.pid
        if await _reply(self._actor.ping.remote(), PING_TIMEOUT) is None:
            return False
        self._actor.signal.remote(pid, signal.SIGKILL)
        return True

    async def vitals(self, pid: int) -> tuple[float, bool]:
        return await _reply(self._actor.vitals.remote(pid), PING_TIMEOUT) or (0.0, False)


async def _reply(reply: Any, timeout: float) -> Any:
    """Wait for the reply of an actor; None if it is unreachable."""
    with contextlib.suppress(TimeoutError, RayActorError):
        return await asyncio.wait_for(reply, timeout)
    return None
