"""The commands that `launch status`, `scale`, `restart` and `chaos` send to the supervisor."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from penstock.launch.supervisor.child import Child, kind_of
from penstock.launch.supervisor.processes import Processes
from penstock.launch.supervisor.report import Report
from penstock.launch.supervisor.restart import restart
from penstock.protocol.client.client import AsyncClient
from penstock.protocol.config import MAX_PROCESSES

Answer = dict[str, Any]
Run = Callable[..., Awaitable[Answer]]


class Commands:
    """Commands for one pipeline. Those that change processes of one kind run one after the other.

    An answer is what `control.command` returns, or has an `error` that it raises.
    """

    def __init__(
        self,
        name: str,
        children: dict[str, Child],
        add: Callable[[list[str]], Awaitable[None]],
        client: Callable[[], AsyncClient],
        end: "asyncio.Future[int]",
    ) -> None:
        """name: of the pipeline; children: by name; add: starts more; end: done when it ends."""
        self._name = name
        self._children = children
        self._add = add
        self._client = client
        self._end = end
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """by kind"""
        self._is_started = asyncio.Event()
        self._processes: Processes
        self._report: Report

    def start(self, processes: Processes, report: Report) -> None:
        """Lets commands run, which have waited until the first processes were started."""
        self._processes, self._report = processes, report
        self._is_started.set()

    def all(self) -> dict[str, Run]:
        """Returns each command by its name."""
        return {
            "processes": self._list,
            "scale": self._scale,
            "restart": self._restart,
            "signal": self._signal,
        }

    async def _list(self) -> Answer:
        await self._is_started.wait()
        return {"processes": msgspec.to_builtins(self._report.processes())}

    async def _signal(self, process: str, pid: int, number: int) -> Answer:
        await self._is_started.wait()
        self._processes.signal(process, pid, number)
        return {}

    async def _scale(self, kind: str, number: int) -> Answer:
        if number > MAX_PROCESSES:
            return {"error": f"number: got {number}, expected up to {MAX_PROCESSES} of a kind"}

        async def scale() -> Answer:
            names = self._of(kind)
            await self._processes.remove(names[number:])
            for name in names[number:]:
                del self._children[name]
            await self._add([f"{kind}.{new}" for new in range(len(names) + 1, number + 1)])
            return {"number": len(self._of(kind))}

        return await self._in_turn(kind, scale, f"there were {number} of {kind}")

    async def _restart(self, names: list[str]) -> Answer:
        """Answers when they are back."""

        async def start() -> None:
            for name in names:
                self._children[name].asked_for = True
            await self._processes.start(names)

        async def stop_and_start() -> Answer:
            if missing := [name for name in names if name not in self._children]:
                return {"error": f"there is no process {missing[0]!r} any more"}
            stop = partial(self._processes.stop, names)
            await restart(self._client, set(names), stop, start)
            return {}

        return await self._in_turn(
            kind_of(names[0]), stop_and_start, f"{', '.join(names)} was back"
        )

    async def _in_turn(self, kind: str, work: Callable[[], Awaitable[Answer]], goal: str) -> Answer:
        """Runs a command when those before it, for the same kind, are done."""

        async def run() -> Answer:
            async with self._turns[kind]:
                await self._is_started.wait()
                return await work()

        task = asyncio.create_task(run())
        either: list[asyncio.Future[Any]] = [task, self._end]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        return {"error": f"pipeline {self._name!r} ended before {goal}"}

    def _of(self, kind: str) -> list[str]:
        return [name for name in self._children if kind_of(name) == kind]
