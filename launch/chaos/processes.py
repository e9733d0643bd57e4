"""Processes of a pipeline as its supervisor reports them, and signals to them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Self

import psutil
import zmq

from penstock.launch.chaos.schedule import Kill
from penstock.launch.pipeline.control_client import TIMEOUT, list_processes, send_signal
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.pipeline.run_folder import control_endpoint
from penstock.protocol.config import run_folder
from penstock.protocol.messages.supervisor import ControlReply, ListProcesses, Spawned
from penstock.protocol.transport.context import Context, attend, leave


class Changes:
    """Wakes those who wait for something that any news may have brought."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        news, self._next = self._next, asyncio.Event()
        news.set()

    async def until(self, true: Callable[[], bool], silence: float | None = None) -> None:
        """Wait until `true`. Raises TimeoutError after `silence` seconds without any news."""
        while not true():
            async with asyncio.timeout(silence):
                await self._next.wait()


class Processes:
    """Name → pid, kept up to date by the supervisor's events; to be entered with `async with`."""

    def __init__(self, pipeline: str, changes: Changes) -> None:
        self.num_restarts: Counter[str] = Counter()  # by name
        # every process that was seen on this machine, if there is no other one
        self.seen: list[psutil.Process] = []
        self.pids: dict[str, int] = {}
        self._pipeline = pipeline
        self._changes = changes

    async def __aenter__(self) -> Self:
        """Raise LaunchError if the supervisor does not reply."""
        self._context: Context = Context()
        endpoint = control_endpoint(run_folder(self._pipeline))
        self._events = self._context.connect(zmq.DEALER, endpoint, ControlReply | Spawned)
        self._handlers = [(self._events, self._receive)]
        self._events.send(ListProcesses(watch=True))
        attend(self._handlers)
        try:
            await self._changes.until(lambda: bool(self.pids), TIMEOUT)
        except TimeoutError:
            raise LaunchError(f"the supervisor of {self._pipeline!r} does not reply") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        leave(self._handlers)
        self._context.destroy(linger=0)

    def send(self, kill: Kill) -> int:
        """Send the signal; return the pid, by which `is_replaced` knows the process.

        One that has just died by itself gets none: its end is the same.
        """
        pid = self.pids[kill.process]
        send_signal(self._pipeline, kill.process, pid, kill.number)
        return pid

    def is_replaced(self, hit: dict[str, int]) -> bool:
        """Return whether each process (name → pid) was restarted."""
        return all(self.pids[name] != pid for name, pid in hit.items())

    def memory(self) -> dict[str, int]:
        """Resident bytes by kind of process, of those that are there."""
        used: Counter[str] = Counter()
        for one in list_processes(self._pipeline):
            used[kind_of(one.name)] += one.rss_bytes
        return dict(used)

    def _receive(self) -> None:
        """Take all processes from the reply, and later those that were restarted."""
        for _, message in self._events.receive():
            if isinstance(message, ControlReply):
                for one in message.processes:
                    self._see(one.name, one.pid, one.node)
            elif message.name in self.pids:
                self.num_restarts[message.name] += 1
                self._see(message.name, message.pid, message.node)
            self._changes.notify()

    def _see(self, name: str, pid: int, node: str) -> None:
        self.pids[name] = pid
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen += [] if node else [psutil.Process(pid)]
