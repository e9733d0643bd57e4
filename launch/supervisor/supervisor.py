"""Supervisor that keeps the processes of one pipeline running.

`Processes` runs them, on this machine or on a Ray cluster. The supervisor decides how often a
process may die, owns the watchdog, and ends the pipeline: the first signal drains, the next stops.
"""

import asyncio
import logging
import os
import signal
import time
from collections import OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.owner import notify_ready, watch_owner
from penstock.launch.pipeline.procfile import kind_of, process_names, read_procfile
from penstock.launch.pipeline.run_folder import base_url, model_name, restore_config
from penstock.launch.supervisor.child_process import describe_exit
from penstock.launch.supervisor.control_server import ControlServer, Report
from penstock.launch.supervisor.local import LocalProcesses
from penstock.launch.supervisor.output import LogToOutput, Output, as_json, prefixed
from penstock.launch.supervisor.processes import (
    MakeProcesses,
    ManagedProcess,
    Tasks,
    traceback_lines,
)
from penstock.launch.supervisor.watchdog import Watchdog
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import Config
from penstock.protocol.messages.supervisor import PoisonFound, ProcessesDied, SuspectsCleared
from penstock.protocol.poison import PoisonList
from penstock.protocol.transport.context import endpoints
from penstock.protocol.transport.process import text_line

CRASH_WINDOW = 60.0  # seconds within which deaths are counted
MAX_DEATHS = 1 << 10  # newest deaths whose suspects are remembered
MAX_EARLY_DEATHS = 3  # deaths of a process that stop a pipeline which was never ready


class Deaths:
    """Counter of deaths; deaths that a request may explain do not count."""

    def __init__(self) -> None:
        self.poison = PoisonList()  # poison requests
        # name → times and pids
        self._recent: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        # (name, pid) → digests of suspects that are not cleared
        self._suspects: OrderedDict[tuple[str, int], set[bytes]] = OrderedDict()

    def count(self, name: str, pid: int) -> int:
        """Count a death; return the process's number of unexplained deaths within the window."""
        now, recent = time.monotonic(), self._recent[name]
        recent.append((now, pid))
        while recent[0][0] < now - CRASH_WINDOW:
            recent.popleft()
        return sum((name, pid) not in self._suspects for _, pid in recent)

    def handle(self, message: ProcessesDied | PoisonFound | SuspectsCleared) -> None:
        match message:
            case ProcessesDied(processes, suspects):
                for death in processes:
                    self._suspects.setdefault(death, set()).update(suspects)
                while len(self._suspects) > MAX_DEATHS:
                    self._suspects.popitem(last=False)
            case SuspectsCleared(digests):
                for death, left in list(self._suspects.items()):
                    left.difference_update(digests)
                    if not left:
                        del self._suspects[death]
            case PoisonFound(digest):
                # this count is never cleared, so the death stays explained
                self.poison.put(digest, 1)


class Supervisor:
    """The processes of one pipeline."""

    def __init__(
        self,
        config: Config,
        commands: dict[str, str],
        max_deaths: int,
        make_processes: MakeProcesses = LocalProcesses,
    ) -> None:
        self._config = config
        self._commands = commands
        self._max_deaths = max_deaths
        self._make_processes = make_processes
        self._deaths = Deaths()
        self._was_ready = self._draining = False
        self._report: Report | None = None
        self._started = time.monotonic()

    async def run(self) -> int:
        """Run until a signal or a process failure ends the pipeline; return the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        self._end: asyncio.Future[int] = loop.create_future()

        def closed() -> None:  # called for `launch all | head`
            loop.call_soon_threadsafe(self._stop, 0)

        self._output = Output(closed, self._dropped)
        log_handler = LogToOutput(self.say)
        logging.getLogger().addHandler(log_handler)
        try:
            return await self._run(loop)
        finally:
            logging.getLogger().removeHandler(log_handler)
            self._output.close()

    async def _run(self, loop: asyncio.AbstractEventLoop) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._drain)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # unless started by nohup
            loop.add_signal_handler(signal.SIGHUP, self._stop, 0)
        watch_owner(partial(self._stop, 0))
        config, survived, fatal = self._config, Tasks(self._say_error), Tasks(self._fail)
        processes = self._make_processes(config, self._commands, self, fatal)
        self._processes = processes
        self._watchdog = Watchdog(
            config,
            self.say,
            processes.by_name,
            processes.watchdog_context,
            Tasks(self._say_error),
            self._deaths.handle,
        )
        kinds = list(self._commands)
        report = Report(config, kinds, processes, self._watchdog, self._deaths.poison)
        self._control = ControlServer(config, processes, report, self._client, self._end, survived)
        # set before the first process runs, since a signal may follow at once
        self._report = report
        await processes.add(process_names(config, self._commands))
        announcing = fatal.start(self._announce())
        try:
            return await self._end
        finally:
            announcing.cancel()
            report.close()
            self._watchdog.close()
            await processes.close()
            await self._control.close()

    async def _announce(self) -> None:
        async with self._client() as client:
            await client.status(wait=True)
        self._was_ready = True
        seconds = time.monotonic() - self._started
        where = self._config.endpoint
        if self._config.http:
            where += f" and {base_url(self._config)}"
        number = f"{len(self._processes.by_name)} processes, {seconds:.1f} s"
        sizes = [
            (model.model_name, f"tp {model.tp}" + f", dp {model.dp}" * (model.dp > 1))
            for model in self._config.by_model()
        ]
        ready = f"ready: {model_name(self._config)} on {where} ({sizes[0][1]}, {number})"
        if len(sizes) > 1:
            names = ", ".join(f"{name} ({size})" for name, size in sizes)
            ready = f"ready: {names} on {where} ({number})"
        self._write(self._plain(ready))
        notify_ready()

    def _client(self) -> AsyncClient:
        at = endpoints(self._config).inner_clients
        return AsyncClient(at, context=self._processes.context)

    def may_spawn(self, process: ManagedProcess) -> bool:
        """Decide like `Policy.may_spawn`; the first start does not count as a restart."""
        process.num_starts += 1
        if not self._has_config():
            return False
        if process.num_starts == 1:
            return True
        if process.is_restart_requested:
            process.is_restart_requested = False
            self.say(f"{process.name} restarted on request")
            return True
        is_gateway = kind_of(process.name) == "gateway"
        if self._draining and is_gateway and process.end == describe_exit(0):
            # no request is open; a killed gateway is restarted and continues to drain
            self._stop(0)
            return False
        if process.last_pid and process.last_pid == process.killed_with_group:
            self.say(f"{process.name} restarted with its group")
            return True
        if not self._was_ready and process.end == describe_exit(os.EX_CONFIG):
            reason = process.last_lines[-1].partition(" E ")[2] if process.last_lines else ""
            self._output.write(self._plain(f"launch: {process.name}: {reason}"), is_error=True)
            self._stop(2)
            return False
        num_deaths = self._deaths.count(process.name, process.last_pid)
        limit = self._max_deaths if self._was_ready else min(self._max_deaths, MAX_EARLY_DEATHS)
        if num_deaths < limit:
            self.say(f"{process.name} died with {process.end}; restarted")
            return True
        self._give_up(process, num_deaths)
        return False

    def _has_config(self) -> bool:
        """Restore the configuration in the run folder; if this fails, end the pipeline."""
        if self._config.backend == "local":
            try:
                restore_config(self._config)
            except (LaunchError, OSError) as error:
                text = f"launch: {error}; the pipeline stops"
                self._output.write(self._plain(text), is_error=True)
                self._stop(1)
                return False
        return True

    def spawned(self, process: ManagedProcess) -> None:
        # other processes in a --procfile send no heartbeats
        if kind_of(process.name) in read_procfile():
            self._watchdog.spawned(process)
        self._control.spawned(process)

    def exited(self, process: ManagedProcess) -> None:
        self._watchdog.exited(process)

    def stopped(self, process: ManagedProcess) -> None:
        self._watchdog.stopped(process)

    def take_line(self, process: ManagedProcess, text: str) -> None:
        process.last_lines.append(text)
        self._write(self._line(text, process.name, process.node))

    def _give_up(self, process: ManagedProcess, num_deaths: int) -> None:
        when = f"within {CRASH_WINDOW:.0f} s" if self._was_ready else "before it was ready"
        lines = "".join(f"\n  {line}" for line in process.last_lines)
        text = (
            f"launch: {process.name} died {num_deaths} times {when}, the last time with "
            f"{process.end}; the pipeline stops. Its last lines:{lines}"
        )
        self._output.write(self._plain(text), is_error=True)
        self._stop(1)

    def _drain(self) -> None:
        """Drain the gateway on the first signal; on the next signal, stop at once.

        The gateway exits when no request is open, and the pipeline then stops.
        """
        if self._draining or "gateway" not in self._commands or self._report is None:
            self._stop(0)
            return
        self._draining = True
        seconds = self._config.drain_timeout
        self._report.drain()
        self.say(f"no new requests; open ones have {seconds:g} s, or until the next signal")
        asyncio.get_running_loop().call_later(seconds, self._stop, 0)

    def say(self, text: str) -> None:
        is_json = self._config.log_format == "json"
        self._write(self._line(text if is_json else text_line(text)))

    def _line(self, text: str, name: str = "launch", node: str = "") -> str:
        """Return the text printed for a line of a process, or of the supervisor."""
        if self._config.log_format == "json":
            return as_json(text, name, node)
        kinds = [*self._commands, name]
        return prefixed(text, name, kinds.index(kind_of(name)), node)

    def _plain(self, text: str) -> str:
        """Return a line of the supervisor that has a prefix only in JSON."""
        return self._line(text) if self._config.log_format == "json" else f"{text}\n"

    def _write(self, text: str) -> None:
        self._output.write(text)

    def _dropped(self, number: int) -> str:
        return self._line(f"{number} lines dropped: nobody read them, or the disk was full")

    def _stop(self, exit_code: int) -> None:
        if not self._end.done():
            self._end.set_result(exit_code)

    def _fail(self, error: BaseException) -> None:
        """End the pipeline with the exception of a task without which it can't run."""
        if self._end.done():
            self._say_error(error)
        else:
            self._end.set_exception(error)

    def _say_error(self, error: BaseException) -> None:
        for line in traceback_lines(error):
            self.say(line)

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.say(context["message"])
        if error := context.get("exception"):
            self._say_error(error)
