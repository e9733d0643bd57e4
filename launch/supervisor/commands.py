"""Execution of the requests that `launch` commands send to the supervisor."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.supervisor.child import Child
from penstock.launch.supervisor.processes import Processes
from penstock.launch.supervisor.report import Report
from penstock.launch.supervisor.restart import restart
from penstock.protocol.client.client import AsyncClient
from penstock.protocol.config import MAX_PROCESSES
from penstock.protocol.messages.control import (
    ControlReply,
    ControlRequest,
    ListProcesses,
    RestartProcesses,
    ScaleProcesses,
    SignalProcess,
)


class Commands:
    """Commands of one pipeline; those that change processes of one kind run one after the other."""

    def __init__(
        self,
        kinds: Iterable[str],
        children: dict[str, Child],
        add: Callable[[list[str]], Awaitable[None]],
        client: Callable[[], AsyncClient],
    ) -> None:
        """kinds: of processes; children: by name; add: starts more processes."""
        self._kinds = kinds
        self._children = children
        self._add = add
        self._client = client
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """by kind"""
        self._is_started = asyncio.Event()
        self._processes: Processes[Any]
        self._report: Report

    def start(self, processes: Processes[Any], report: Report) -> None:
        """Let commands run, which have waited until the first processes were started."""
        self._processes, self._report = processes, report
        self._is_started.set()

    async def run(self, request: ControlRequest) -> ControlReply:
        """Execute a request."""
        await self._is_started.wait()
        match request:
            case ListProcesses():
                return ControlReply(processes=self._report.processes())
            case SignalProcess(name, pid, number):
                self._processes.signal(name, pid, number)
                return ControlReply()
            case ScaleProcesses(kind, number):
                async with self._turns[kind]:
                    return await self._scale(kind, number)
            case RestartProcesses(names):
                async with self._turns[kind_of(names[0])]:
                    return await self._restart(names)

    async def _scale(self, kind: str, number: int) -> ControlReply:
        if number > MAX_PROCESSES:
            return ControlReply(f"number: got {number}, expected up to {MAX_PROCESSES} of a kind")
        if kind not in self._kinds:
            return ControlReply(f"kind: got {kind!r}, expected one of {', '.join(self._kinds)}")
        names = self._of(kind)
        await self._processes.remove(names[number:])
        for name in names[number:]:
            del self._children[name]
        await self._add([f"{kind}.{new}" for new in range(len(names) + 1, number + 1)])
        return ControlReply(number=len(self._of(kind)))

    async def _restart(self, names: list[str]) -> ControlReply:
        async def start() -> None:
            for name in names:
                self._children[name].asked_for = True
            await self._processes.start(names)

        if missing := [name for name in names if name not in self._children]:
            return ControlReply(f"process: got {missing[0]!r}, which does not run any more")
        stop = partial(self._processes.stop, names)
        await restart(self._client, set(names), stop, start)
        return ControlReply()

    def _of(self, kind: str) -> list[str]:
        return [name for name in self._children if kind_of(name) == kind]
