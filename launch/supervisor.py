"""Keeps the processes of one pipeline running, with circus.

circus spawns, stops (SIGTERM, and SIGKILL after a grace) and restarts; each process is a watcher
of its own, so that it keeps its name. What is ours: a death is seen by SIGCHLD instead of circus's
periodic check, logs go through named pipes (circus closes its own before the last lines of a dead
process are read), the commands that `launch status`, `scale` and `restart` send to circus's
endpoint, the watch over their pulses, and the end: a signal lets what runs be finished, the next
one does not.
"""

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from circus.arbiter import Arbiter
from circus.watcher import Watcher
from tornado.ioloop import IOLoop

from penstock.launch.child import CRASH_WINDOW, Child, kind_of
from penstock.launch.client import AsyncClient
from penstock.launch.logs import Log, Show, as_json, behind_name
from penstock.launch.procfile import read_procfile, shell_line
from penstock.launch.pulses import Pulses
from penstock.launch.report import Report
from penstock.launch.restart import restart
from penstock.launch.running import CONTROL_SOCKET, base_url, environment, model_name
from penstock.protocol.config import Config
from penstock.protocol.process import PROCESS_VARIABLE, SUPERVISOR_VARIABLE

GRACE = 5.0
"""seconds between SIGTERM and SIGKILL"""
MAX_EARLY_DEATHS = 3
"""deaths of one process that stop a pipeline which was never ready"""


class _Command:
    """A command of circus's endpoint."""

    def __init__(self, run: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        self._run = run

    def validate(self, properties: dict[str, Any]) -> None:
        """Asked for by circus; `launch` is the only one that sends these."""

    def execute(self, _arbiter: Arbiter, properties: dict[str, Any]) -> Awaitable[Any]:
        """circus answers when the task is done, if `waiting` is among the properties."""
        given = {key: value for key, value in properties.items() if key != "waiting"}
        return asyncio.ensure_future(self._run(**given))


class Supervisor:
    """The processes of one pipeline."""

    def __init__(self, config: Config, commands: dict[str, str], max_deaths: int) -> None:
        self._config = config
        self._commands = commands
        self._max_deaths = max_deaths
        self._children: dict[str, Child] = {}
        self._was_ready = self._draining = False
        self._started = time.monotonic()

    async def run(self) -> int:
        """Runs until a signal or a process that can't be kept alive ends it: the exit code."""
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = loop.create_future()
        self._death = asyncio.Event()
        self._circus = asyncio.Lock()  # circus refuses a command while another one runs
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._drain)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            loop.add_signal_handler(signal.SIGHUP, self._stop, 0)
        loop.add_signal_handler(signal.SIGCHLD, self._death.set)
        self._pulses = Pulses(self._config, self._say)
        self._arbiter = self._make_arbiter()
        async with self._circus:
            await self._arbiter.start()
        self._report = Report(
            self._config, list(self._commands), self._arbiter, self._children, self._pulses
        )
        tasks = [asyncio.create_task(self._announce()), asyncio.create_task(self._revive())]
        for task in tasks:
            task.add_done_callback(self._check)
        try:
            return await self._end
        finally:
            for task in tasks:
                task.cancel()
            self._report.close()
            self._pulses.close()
            async with self._circus:
                await self._arbiter.stop()
            for child in self._children.values():
                child.log.close()

    def _make_arbiter(self) -> Any:
        folder = self._config.run_folder
        numbers = {
            "scheduler": self._config.dp,
            "worker": (self._config.tp + self._config.spare_workers) * self._config.dp,
            "tokenizer": self._config.tokenizers,
            "detokenizer": self._config.detokenizers,
            "http": self._config.http,
        }
        arbiter = Arbiter(
            [
                Watcher(**self._watcher(kind, number))
                for kind in self._commands
                for number in range(1, numbers.get(kind, 1) + 1)
            ],
            f"ipc://{folder}/{CONTROL_SOCKET}",
            f"ipc://{folder}/{CONTROL_SOCKET}-events",
            check_delay=-1,
            loop=IOLoop.current(),
            proc_name="launch",
        )
        arbiter.ctrl.sys_hdl.stop()  # puts our signal handlers back
        arbiter.ctrl.commands["processes"] = _Command(self._processes)
        arbiter.ctrl.commands["scale"] = _Command(self._scale)
        arbiter.ctrl.commands["restart"] = _Command(self._restart)
        return arbiter

    def _watcher(self, kind: str, number: int) -> dict[str, Any]:
        """The arguments of a circus Watcher for one process."""
        name = f"{kind}.{number}"
        path = self._config.run_folder / f"{name}.log"
        show = self._show(name, list(self._commands).index(kind))
        self._children[name] = Child(Log(path, show, self._write))
        return {
            "name": name,
            "cmd": "sh",
            "args": ["-c", f"{shell_line(self._commands[kind])} >{shlex.quote(str(path))} 2>&1"],
            "env": environment(self._config)
            | {PROCESS_VARIABLE: name, SUPERVISOR_VARIABLE: str(os.getpid())},
            "working_dir": str(Path.cwd()),
            "graceful_timeout": GRACE,
            "hooks": {
                "before_spawn": (self._may_spawn, False),
                "after_spawn": (self._spawned, False),
                "after_reap": (self._reaped, True),
            },
            "loop": IOLoop.current(),
        }

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

    def _client(self) -> AsyncClient:
        return AsyncClient(self._config.endpoint, keys=self._config.keys)

    async def _revive(self) -> None:
        while True:
            await self._death.wait()
            self._death.clear()
            async with self._circus:
                await self._arbiter.manage_watchers()

    def _may_spawn(self, watcher: Watcher, **_: Any) -> bool:
        """circus's hook before every start; the first is no restart."""
        child = self._children[watcher.name]
        child.num_starts += 1
        if child.num_starts == 1:
            return True
        if self._draining and kind_of(watcher.name) == "gateway":  # it has nothing open
            self._stop(0)
            return False
        if child.asked_for:
            child.asked_for = False
            self._say(f"{watcher.name} restarted on request")
            return True
        num_deaths = child.count_death()
        limit = self._max_deaths if self._was_ready else min(self._max_deaths, MAX_EARLY_DEATHS)
        if num_deaths < limit:
            child.log.drain()
            self._say(f"{watcher.name} died with {child.end}; restarted")
            return True
        self._give_up(watcher.name, child, num_deaths)
        return False

    def _spawned(self, watcher: Watcher, pid: int, **_: Any) -> bool:
        if kind_of(watcher.name) in read_procfile():  # others in a --procfile send no pulses
            self._pulses.spawned(watcher.name, pid)
        return True

    def _reaped(self, watcher: Watcher, exit_code: int | None = None, **_: Any) -> None:
        self._children[watcher.name].exit_code = exit_code

    def _give_up(self, name: str, child: Child, num_deaths: int) -> None:
        child.log.drain()
        when = f"within {CRASH_WINDOW:.0f} s" if self._was_ready else "before it was ready"
        lines = "".join(f"\n  {line}" for line in child.log.last_lines)
        text = (
            f"launch: {name} died {num_deaths} times {when}, the last time with "
            f"{child.end}; the pipeline stops. Its last lines:{lines}"
        )
        print(self._plain(text), end="", file=sys.stderr, flush=True)
        self._stop(1)

    async def _processes(self) -> dict[str, Any]:
        """What `launch status` shows of each process."""
        return {"processes": msgspec.to_builtins(self._report.processes())}

    async def _scale(self, kind: str, number: int) -> dict[str, Any]:
        async with self._circus:
            names = [name for name in self._children if kind_of(name) == kind]
            for name in names[number:]:
                await self._arbiter.rm_watcher(name)
                self._children.pop(name).log.close()
            for new in range(len(names) + 1, number + 1):
                await self._arbiter.add_watcher(**self._watcher(kind, new)).start()
        return {"number": number}

    async def _restart(self, names: list[str]) -> dict[str, Any]:
        """Answers when they are back; `back` is False if the pipeline ends before."""

        async def stop() -> None:
            async with self._circus:
                await self._arbiter.stop_watchers(self._watchers(names))

        async def start() -> None:
            for name in names:
                self._children[name].asked_for = True
            async with self._circus:
                await self._arbiter.start_watchers(self._watchers(names))

        task = asyncio.create_task(restart(self._client, set(names), stop, start))
        either: list[asyncio.Future[Any]] = [task, self._end]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        else:
            task.cancel()
        return {"back": task.done()}

    def _watchers(self, names: list[str]) -> Callable[..., list[Watcher]]:
        """Which of its watchers circus is to start or to stop, as it wants to be told."""
        return lambda **_: [one for one in self._arbiter.watchers if one.name in names]

    def _drain(self) -> None:
        """On a signal: the gateway ends when nothing is open, and we then; or now, on the next."""
        names = [name for name in self._children if kind_of(name) == "gateway"]
        gateways = [p for one in self._watchers(names)() for p in one.processes.values()]
        if self._draining or not gateways:
            self._stop(0)
            return
        self._draining = True
        seconds = self._config.drain_timeout
        for gateway in gateways:
            gateway.send_signal(signal.SIGUSR1)
        self._say(f"no new requests; open ones have {seconds:g} s, or until the next signal")
        asyncio.get_running_loop().call_later(seconds, self._stop, 0)

    def _say(self, text: str) -> None:
        self._write(self._show("launch", len(self._commands))(text))

    def _show(self, name: str, index: int) -> Show:
        """How lines of a process are printed."""
        return as_json(name) if self._config.log_format == "json" else behind_name(name, index)

    @property
    def _plain(self) -> Show:
        """How lines of the supervisor itself are printed that are no log in text."""
        return as_json("launch") if self._config.log_format == "json" else "{}\n".format

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:  # nobody reads any more: a closed terminal, `launch all | head`
            self._stop(0)

    def _stop(self, exit_code: int) -> None:
        if not self._end.done():
            self._end.set_result(exit_code)

    def _check(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) and not self._end.done():
            self._end.set_exception(error)
