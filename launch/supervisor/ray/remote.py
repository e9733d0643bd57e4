"""One process on a node of a Ray cluster, as the supervisor knows it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from penstock.launch.supervisor.child import GRACE

PING_TIMEOUT = 1.0
"""seconds within which an actor that can be reached answers"""


class RemoteProcess:
    """One process, its actor, and what is known of both."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actor: Any = None
        self.number = 0
        """of its incarnation"""
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

    async def ask(self, answer: Any, timeout: float) -> bool:
        """Waits for an answer of its actor; False if it can't be reached."""
        with contextlib.suppress(TimeoutError, RayActorError):
            await asyncio.wait_for(answer, timeout)
            return True
        return False

    async def stop(self) -> None:
        """Ends it, as far as it can be reached; it is not started again until it is wanted."""
        self.wanted.clear()
        if self.actor and await self.ask(self.actor.stop.remote(GRACE), GRACE + PING_TIMEOUT):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), GRACE)


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
