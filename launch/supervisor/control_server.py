"""Status of the processes for the gateway, and the control socket for `launch` commands."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import zmq

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import check_open_files, kind_of, numbers_at_start, stem_of
from penstock.launch.pipeline.run_folder import control_endpoint
from penstock.launch.supervisor.processes import ManagedProcess, Processes, Tasks
from penstock.launch.supervisor.watchdog import Watchdog
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import MAX_PROCESSES, Config
from penstock.protocol.messages.client import StatusRequest
from penstock.protocol.messages.status import ProcessStatus, StatusReply
from penstock.protocol.messages.supervisor import (
    ControlReply,
    ControlRequest,
    ListProcesses,
    RestartProcesses,
    ScaleProcesses,
    SignalProcess,
    Spawned,
    SupervisorReport,
)
from penstock.protocol.poison import PoisonList
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import Context, attend, drain, endpoints, leave

Step = Callable[[], Awaitable[None]]


class Report:
    """Sender of the state of the supervisor's processes to the gateway, once a heartbeat."""

    def __init__(
        self,
        config: Config,
        kinds: list[str],
        processes: Processes,
        watchdog: Watchdog,
        poison: PoisonList,
    ) -> None:
        """Initialize; kinds: kinds of processes in the order of the procfile."""
        self.kinds = kinds
        self._processes = processes
        self._watchdog = watchdog
        self._poison = poison
        self._loop = asyncio.get_running_loop()
        at = endpoints(config.by_model()[0]).results
        # at most one report waits for an unavailable gateway; newer reports are dropped
        self._channel = processes.context.connect(zmq.PUSH, at, max_queue=1, wait=False)
        self._is_draining = False
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._send)

    def drain(self) -> None:
        """Report from now on that the pipeline is about to stop."""
        self._is_draining = True
        self._timer.cancel()
        self._send()

    def close(self) -> None:
        self._timer.cancel()
        self._channel.socket.close(linger=0)

    def processes(self) -> list[ProcessStatus]:
        """Return the running processes in the order of the procfile, with their current usage."""
        running = [process for process in self._processes.by_name.values() if process.pid]
        running.sort(key=lambda process: self.kinds.index(kind_of(process.name)))
        return [self._status(process) for process in running]

    def _status(self, process: ManagedProcess) -> ProcessStatus:
        heartbeat = self._watchdog.newest_heartbeat(process.name)
        return ProcessStatus(
            name=process.name,
            pid=process.pid,
            node=process.node,
            uptime=time.monotonic() - process.started_at,
            restarts=process.num_starts - 1,
            cpu_seconds=heartbeat.cpu_seconds,
            rss_bytes=heartbeat.rss_bytes,
            counters=heartbeat.counters,
        )

    def _send(self) -> None:
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._send)
        digests = self._poison.digests()
        self._channel.send(SupervisorReport(self.processes(), self._is_draining, digests))


class ControlServer:
    """Server of the control socket: runs each request in a task, and replies when it is done.

    Requests that change processes of the same kind run one after the other.
    """

    def __init__(
        self,
        config: Config,
        processes: Processes,
        report: Report,
        connect: Callable[[], AsyncClient],
        end: "asyncio.Future[int]",
        tasks: Tasks,
    ) -> None:
        """Bind the socket in the run folder.

        connect: returns a client of the pipeline. end: completes when the pipeline is to end, which
        also ends requests. tasks: reports exceptions.
        """
        self._config = config
        self._processes = processes
        self._report = report
        self._connect = connect
        self._end = end
        self._tasks = tasks
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by kind of process
        self._watchers: set[bytes] = set()
        self._context: Context = Context()
        endpoint = control_endpoint(config.run_folder)
        self._channel = self._context.bind(zmq.ROUTER, endpoint, ControlRequest)
        self._handlers = [(self._channel, self._receive)]
        attend(self._handlers)

    def spawned(self, process: ManagedProcess) -> None:
        event = Spawned(process.name, process.pid, process.node)
        self._watchers = {peer for peer in self._watchers if self._channel.send(event, peer)}
        drain(self._handlers)  # sending may have consumed what the descriptor signals

    async def close(self) -> None:
        """Send the last replies and close the socket; `end` is already done."""
        await self._tasks.wait()
        leave(self._handlers)
        self._channel.socket.close()
        self._context.term()

    def _receive(self) -> None:
        for peer, request in self._channel.receive():
            if isinstance(request, ListProcesses) and request.watch:
                self._watchers.add(peer)
            self._tasks.start(self._answer(peer, request))

    async def _answer(self, peer: bytes, request: ControlRequest) -> None:
        task = asyncio.create_task(self._run(request))
        either: list[asyncio.Future[Any]] = [task, self._end]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._reply(peer, ControlReply("the pipeline ended before the command was done"))
        elif error := task.exception():
            self._reply(peer, ControlReply(f"the command failed: {error!r}"))
            raise error
        else:
            self._reply(peer, task.result())

    def _reply(self, peer: bytes, reply: ControlReply) -> None:
        self._channel.send(reply, peer)
        drain(self._handlers)

    async def _run(self, request: ControlRequest) -> ControlReply:
        match request:
            case ListProcesses():
                return ControlReply(processes=self._report.processes())
            case SignalProcess(name, pid, number):
                process = self._processes.by_name.get(name)
                if process and process.pid == pid:
                    process.signal(number)
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
        known = numbers_at_start(self._config, self._report.kinds)
        if kind not in known:
            return ControlReply(f"kind: got {kind!r}, expected one of {', '.join(known)}")
        names = [name for name in self._processes.by_name if stem_of(name) == kind]
        if number > len(names):
            try:
                check_open_files(len(self._processes.by_name) - len(names) + number)
            except LaunchError as error:
                return ControlReply(str(error))
        await self._processes.remove(names[number:])
        added = [f"{kind}.{n}" for n in range(len(names) + 1, number + 1)]
        await self._processes.add(added)
        await self._processes.wait_spawned(added)
        return ControlReply(number=number)

    async def _restart(self, names: list[str]) -> ControlReply:
        if missing := [name for name in names if name not in self._processes.by_name]:
            return ControlReply(f"process: got {missing[0]!r}, which does not run any more")
        stop, start = partial(self._processes.stop, names), partial(self._processes.restart, names)
        await restart(self._connect, set(names), stop, start)
        await self._processes.wait_spawned(names)
        for name in names:
            if kind_of(name) == "http":  # the pipeline can be ready without HTTP processes
                await self._processes.by_name[name].has_started.wait()
        return ControlReply()


async def restart(
    connect: Callable[[], AsyncClient], names: set[str], stop: Step, start: Step
) -> None:
    """Stop and start processes of a kind; return when they are back and the pipeline is ready.

    The pipeline identifies processes by the names of their predecessors. So each kind of process
    needs a sign that can't come from a predecessor.
    """
    async with connect() as client:
        match kind_of(min(names)):
            case "tokenizer" | "detokenizer":  # the names disappear, and come back
                await stop()
                await _until(client, lambda present: not names & present)
                await start()
                await _until(client, lambda present: names <= present)
            case "scheduler" | "worker":  # without these processes nothing is ready
                await stop()
                # the next report lacks these names; a report before the processes' end would not
                answer = client.ask(StatusRequest(wait=True, fresh=True))
                await client.status()  # sent after the report, so the gateway has both
                await start()
                while not answer.final:
                    await client.change(answer)
            case _:
                await stop()
                await start()
    async with connect() as client:  # a new connection, which the predecessor never had
        await client.status(wait=True)


async def _until(client: AsyncClient, found: Callable[[set[str]], bool]) -> None:
    """Wait for a report of the scheduler whose names fulfil the condition."""
    while not found(registered(await client.status(fresh=True))):
        pass


def registered(status: StatusReply) -> set[str]:
    """Return the tokenizers and detokenizers that are registered."""
    return {*status.tokenizers, *(status.scheduler.detokenizers if status.scheduler else ())}
