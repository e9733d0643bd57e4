"""The processes of a pipeline as its supervisor tells of them, and signals to them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import msgspec
import psutil
import zmq
import zmq.asyncio

from penstock.launch.chaos.schedule import Kill
from penstock.launch.control_client import command
from penstock.launch.run_folder import CONTROL_SOCKET
from penstock.launch.supervisor.child import kind_of
from penstock.launch.supervisor.control_server import SPAWNED
from penstock.protocol.config import run_folder


class Changes:
    """Wakes those who wait for something that any news may have brought."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """There is news."""
        news, self._next = self._next, asyncio.Event()
        news.set()

    async def until(self, true: Callable[[], bool], silence: float | None = None) -> None:
        """Waits until `true`. Raises TimeoutError after `silence` seconds without any news."""
        while not true():
            async with asyncio.timeout(silence):
                await self._next.wait()


class Processes:
    """Name → pid, kept up to date by the supervisor's events; to be entered with `async with`."""

    def __init__(self, pipeline: str, changes: Changes) -> None:
        """Raises LaunchError if the supervisor does not answer."""
        self.num_restarts: Counter[str] = Counter()
        """by name"""
        self.seen: list[psutil.Process] = []
        """every process there has been on this machine, if there is no other one"""
        self._pipeline = pipeline
        self._changes = changes
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(SPAWNED)
        self._events.connect(f"ipc://{run_folder(pipeline)}/{CONTROL_SOCKET}-events")
        self.pids: dict[str, int] = {}
        for one in self._ask():
            self.pids[one["name"]] = one["pid"]
            self._see(one["pid"], one.get("node", ""))

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    def send(self, kill: Kill) -> int:
        """Sends the signal; returns the pid, by which `is_replaced` knows the process.

        One that has just died by itself gets none: its end is the same.
        """
        pid = self.pids[kill.process]
        command(self._pipeline, "signal", process=kill.process, pid=pid, number=kill.number)
        return pid

    def is_replaced(self, hit: dict[str, int]) -> bool:
        """Whether each process (name → pid) has been started again."""
        return all(self.pids[name] != pid for name, pid in hit.items())

    def memory(self) -> dict[str, int]:
        """Resident bytes by kind of process, of those that are there."""
        used: Counter[str] = Counter()
        for one in self._ask():
            used[kind_of(one["name"])] += one.get("rss_bytes", 0)
        return dict(used)

    def _ask(self) -> list[dict[str, Any]]:
        """The supervisor, for a `ProcessStatus` of each."""
        found: list[dict[str, Any]] = command(self._pipeline, "processes")["processes"]
        return found

    async def _listen(self) -> None:
        while True:
            _, text = await self._events.recv_multipart()
            one = msgspec.json.decode(text)
            if one["name"] in self.pids:
                self.pids[one["name"]] = one["pid"]
                self.num_restarts[one["name"]] += 1
                self._see(one["pid"], one["node"])
                self._changes.tell()

    def _see(self, pid: int, node: str) -> None:
        if node:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen.append(psutil.Process(pid))
