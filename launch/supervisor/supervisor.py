"""Supervisor that keeps the processes of one pipeline running.

`Processes` runs them, on this machine or on a Ray cluster. The supervisor decides how often a
process may die, owns the watchdog, and ends the pipeline: the first signal drains, the next stops.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.owner import notify_ready, watch_owner
from penstock.launch.pipeline.procfile import kind_of, process_names, read_procfile
from penstock.launch.pipeline.run_folder import base_url, model_name, restore_config
from penstock.launch.supervisor.child import CRASH_WINDOW, Child, ExplainedDeaths
from penstock.launch.supervisor.child_process import describe_exit
from penstock.launch.supervisor.commands import Commands
from penstock.launch.supervisor.control_server import ControlServer
from penstock.launch.supervisor.local import LocalProcesses
from penstock.launch.supervisor.logs import Show, as_json, behind_name
from penstock.launch.supervisor.output import LogToOutput, Output
from penstock.launch.supervisor.processes import Policy, Processes
from penstock.launch.supervisor.report import Report
from penstock.launch.supervisor.tasks import Tasks, traceback_lines
from penstock.launch.supervisor.watchdog import Watchdog
from penstock.protocol.client.client import AsyncClient
from penstock.protocol.config import Config
from penstock.protocol.messages.control import Spawned
from penstock.protocol.transport.context import endpoints

MAX_EARLY_DEATHS = 3
"""deaths of one process that stop a pipeline which was never ready"""
MakeProcesses = Callable[[Config, dict[str, str], Policy], Processes[Any]]
"""from the configuration, and the commands by kind of process"""


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
        self._children: dict[str, Child] = {}
        self._was_ready = self._draining = False
        self._report: Report | None = None
        self._started = time.monotonic()

    async def run(self) -> int:
        """Run until a signal or a process that can't be kept alive ends it: the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        self._end: asyncio.Future[int] = loop.create_future()

        def closed() -> None:  # by `launch all | head`
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
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            loop.add_signal_handler(signal.SIGHUP, self._stop, 0)
        watch_owner(partial(self._stop, 0))
        commands = Commands(self._commands, self._children, self._add, self._client)
        folder, control_tasks = self._config.run_folder, Tasks(self._say_error)
        self._control = ControlServer(folder, commands.run, self._end, control_tasks)
        processes = self._make_processes(self._config, self._commands, self)
        self._processes = processes
        deaths = ExplainedDeaths(self._children)
        self._watchdog = Watchdog(
            self._config,
            self.say,
            processes.host,
            processes.watchdog_context,
            Tasks(self._say_error),
            deaths.handle,
        )
        kinds = list(self._commands)
        report = Report(self._config, kinds, processes, self._children, self._watchdog, deaths)
        self._report = report  # before the first process runs: a signal may follow at once
        await self._add(process_names(self._config, self._commands))
        commands.start(processes, report)
        tasks = Tasks(self._fail)
        for coroutine in (self._announce(), processes.keep()):
            tasks.start(coroutine)
        try:
            return await self._end
        finally:
            tasks.cancel()
            report.close()
            self._watchdog.close()
            await processes.close()
            await self._control.close()

    async def _add(self, names: list[str]) -> None:
        for name in names:
            self._children[name] = Child(self._show(name))
        await self._processes.add(names)

    async def _announce(self) -> None:
        async with self._client() as client:
            await client.status(wait=True)
        self._was_ready = True
        seconds = time.monotonic() - self._started
        where = self._config.endpoint
        if self._config.http:
            where += f" and {base_url(self._config)}"
        size = f"tp {self._config.tp}" + (f", dp {self._config.dp}" * (self._config.dp > 1))
        ready = (
            f"ready: {model_name(self._config)} on {where} ({size}, "
            f"{len(self._children)} processes, {seconds:.1f} s)"
        )
        self._write(self._plain(ready))
        notify_ready()

    def _client(self) -> AsyncClient:
        if self._config.backend == "ray":
            return AsyncClient(
                endpoints(self._config).inner_clients, context=self._processes.context
            )
        return AsyncClient(self._config.endpoint, keys=self._config.curve_keys)

    def may_spawn(self, name: str) -> bool:
        """As `Policy.may_spawn`; the first start is not a restart."""
        child = self._children[name]
        child.num_starts += 1
        if not self._has_config():
            return False
        if child.num_starts == 1:
            return True
        if child.asked_for:
            child.asked_for = False
            self.say(f"{name} restarted on request")
            return True
        if self._draining and kind_of(name) == "gateway" and child.end == describe_exit(0):
            self._stop(0)  # nothing is open; one that was killed is restarted, and drained on
            return False
        num_deaths = child.count_death()
        limit = self._max_deaths if self._was_ready else min(self._max_deaths, MAX_EARLY_DEATHS)
        if num_deaths < limit:
            self.say(f"{name} died with {child.end}; restarted")
            return True
        self._give_up(name, child, num_deaths)
        return False

    def _has_config(self) -> bool:
        """Restore the configuration in the run folder; on failure end the pipeline."""
        if self._config.backend == "local":
            try:
                restore_config(self._config)
            except (LaunchError, OSError) as error:
                text = f"launch: {error}; the pipeline stops"
                self._output.write(self._plain(text), is_error=True)
                self._stop(1)
                return False
        return True

    def spawned(self, name: str, pid: int, node: str = "") -> None:
        """As `Policy.spawned`."""
        self._children[name].show = self._show(name, node)
        self._children[name].pid = pid
        if kind_of(name) in read_procfile():  # others in a --procfile send no pulses
            self._watchdog.spawned(name, pid)
        self._control.spawned(Spawned(name, pid, node))

    def line(self, name: str, text: str) -> None:
        """As `Policy.line`."""
        child = self._children[name]
        child.last_lines.append(text)
        self._write(child.show(text))

    def reaped(self, name: str, end: str) -> None:
        """As `Policy.reaped`."""
        self._children[name].end = end

    def _give_up(self, name: str, child: Child, num_deaths: int) -> None:
        when = f"within {CRASH_WINDOW:.0f} s" if self._was_ready else "before it was ready"
        lines = "".join(f"\n  {line}" for line in child.last_lines)
        text = (
            f"launch: {name} died {num_deaths} times {when}, the last time with "
            f"{child.end}; the pipeline stops. Its last lines:{lines}"
        )
        self._output.write(self._plain(text), is_error=True)
        self._stop(1)

    def _drain(self) -> None:
        """On a signal: the gateway ends when nothing is open, and we then; or now, on the next."""
        has_gateway = any(kind_of(name) == "gateway" for name in self._children)
        if self._draining or not has_gateway or self._report is None:
            self._stop(0)
            return
        self._draining = True
        seconds = self._config.drain_timeout
        self._report.drain()
        self.say(f"no new requests; open ones have {seconds:g} s, or until the next signal")
        asyncio.get_running_loop().call_later(seconds, self._stop, 0)

    def say(self, text: str) -> None:
        """As `Policy.say`."""
        self._write(self._show("launch")(text))

    def _show(self, name: str, node: str = "") -> Show:
        """Return the format of lines of a process."""
        if self._config.log_format == "json":
            return as_json(name, node)
        kinds = [*self._commands, name]
        return behind_name(name, kinds.index(kind_of(name)), node)

    @property
    def _plain(self) -> Show:
        """Return the format of the supervisor's own lines, which have a prefix in JSON only."""
        return as_json("launch") if self._config.log_format == "json" else "{}\n".format

    def _write(self, text: str) -> None:
        self._output.write(text)

    def _dropped(self, number: int) -> str:
        return self._show("launch")(f"{number} lines dropped: nobody read them")

    def _stop(self, exit_code: int) -> None:
        if not self._end.done():
            self._end.set_result(exit_code)

    def _fail(self, error: BaseException) -> None:
        """End the pipeline with an exception, without whose task it can't be kept."""
        if self._end.done():
            self._say_error(error)
        else:
            self._end.set_exception(error)

    def _say_error(self, error: BaseException) -> None:
        """Log an exception that the pipeline survives."""
        for line in traceback_lines(error):
            self.say(line)

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what a callback raised."""
        self.say(context["message"])
        if error := context.get("exception"):
            self._say_error(error)
