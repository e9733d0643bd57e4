"""Processes of a pipeline as its supervisor reports them, and signals to them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Self

import msgspec
import psutil
import zmq
import zmq.asyncio

from penstock.launch.chaos.schedule import Kill
from penstock.launch.pipeline.control_client import TIMEOUT, list_processes, send_signal
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.pipeline.run_folder import control_endpoint
from penstock.protocol.config import run_folder
from penstock.protocol.messages.control import ControlReply, ListProcesses, Spawned


class Changes:
    """Wakes those who wait for something that any news may have brought."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """There is news."""
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
        self.num_restarts: Counter[str] = Counter()
        """by name"""
        self.seen: list[psutil.Process] = []
        """every process that was seen on this machine, if there is no other one"""
        self.pids: dict[str, int] = {}
        self._pipeline = pipeline
        self._changes = changes

    async def __aenter__(self) -> Self:
        """Raise LaunchError if the supervisor does not reply."""
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.DEALER)
        self._events.connect(control_endpoint(run_folder(self._pipeline)))
        await self._events.send(msgspec.msgpack.encode(ListProcesses(watch=True)))
        try:
            async with asyncio.timeout(TIMEOUT):
                while not self.pids:
                    self._take(await self._receive())
        except TimeoutError:
            raise LaunchError(f"the supervisor of {self._pipeline!r} does not reply") from None
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
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

    async def _listen(self) -> None:
        while True:
            self._take(await self._receive())

    async def _receive(self) -> ControlReply | Spawned:
        frame = await self._events.recv()
        return msgspec.msgpack.decode(frame, type=ControlReply | Spawned)

    def _take(self, message: ControlReply | Spawned) -> None:
        """Take all processes from a reply, and later those that were restarted."""
        if isinstance(message, ControlReply):
            for one in message.processes:
                self.pids[one.name] = one.pid
                self._see(one.pid, one.node)
        elif message.name in self.pids:
            self.pids[message.name] = message.pid
            self.num_restarts[message.name] += 1
            self._see(message.pid, message.node)
            self._changes.tell()

    def _see(self, pid: int, node: str) -> None:
        if node:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen.append(psutil.Process(pid))
