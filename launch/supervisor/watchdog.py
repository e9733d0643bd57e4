"""Watchdog over the processes: it kills hanging processes and those that depend on dead ones.

A process sends a heartbeat every half second. The first must arrive within the time that a step may
take. A process without heartbeats is killed if it was stopped or has used no CPU time for the hang
timeout. As long as it uses CPU time (a call of C that holds the interpreter's lock), it has the
time of a step. A process that reports to be at one step for too long is killed as well. Killed
processes are restarted like any dead process.

When a worker dies, the other workers of its group are killed: they may be waiting for it in a
collective. The same happens when a worker is unreachable. The unreachable worker itself is left
alone, because its machine may be cut off. A worker that dies before its heartbeat names the group
leaves workers that wait for it. A group that lacks ranks for the hang timeout is therefore killed
as well.

A supervisor that was itself suspended (the whole machine stood still) can't know which processes
were silent. All processes then have their full time again.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping

import zmq

from penstock.launch.supervisor.processes import ManagedProcess, Tasks
from penstock.protocol.config import Config
from penstock.protocol.messages.supervisor import (
    PoisonFound,
    ProcessesDied,
    SupervisorHeartbeat,
    SuspectsCleared,
    ToSupervisor,
)
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import Context, attend, endpoints, leave

# seconds by which the supervisor's own timer may be late if the supervisor was not stopped
MAX_LATE = 2 * HEARTBEAT_INTERVAL


class _Watched:
    """State of one run of a process."""

    def __init__(self, process: ManagedProcess, now: float) -> None:
        """Initialize; now: time by the event loop's clock, like all times here."""
        self.process = process
        self.heartbeat = SupervisorHeartbeat(process.name, process.pid)  # the newest heartbeat
        self.has_started = False  # a heartbeat has arrived
        self.heard_at = now  # time of the newest heartbeat; initially of the start
        self.worked_at = now  # latest time since then at which the process was seen to use a CPU
        self.cpu_seconds = 0.0  # CPU seconds at the last examination
        self.is_being_examined = self.is_being_killed = self.has_exited = False
        self.is_unreachable = False  # unreachable since the newest heartbeat


class Watchdog:
    """Receiver of heartbeats of the supervisor's processes, in its event loop."""

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        processes: Mapping[str, ManagedProcess],
        context: Context,
        tasks: Tasks,
        on_deaths: Callable[[ProcessesDied | PoisonFound | SuspectsCleared], None] = lambda _: None,
    ) -> None:
        """Bind the socket.

        say: receives lines for the log. processes: by name; only these may be killed. on_deaths:
        called with messages about deaths.
        """
        self._on_deaths = on_deaths
        self._hang_timeout = config.hang_timeout
        self._step_timeout = config.step_timeout
        self._say = say
        self._processes = processes
        self._watched: dict[str, _Watched] = {}  # by process name
        self._lacking: dict[str, float] = {}  # group that lacks ranks → time since when
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._channel = context.bind(zmq.PULL, endpoints(config).supervisor, ToSupervisor)
        self._handlers = [(self._channel, self._receive)]
        self._interval = min(HEARTBEAT_INTERVAL, self._hang_timeout / 4)
        self._judge()
        attend(self._handlers)

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._tasks.cancel()
        leave(self._handlers)
        self._channel.socket.close()

    def spawned(self, process: ManagedProcess) -> _Watched:
        """Watch a process from its start, which may also hang."""
        watched = self._watched[process.name] = _Watched(process, self._loop.time())
        return watched

    def exited(self, process: ManagedProcess) -> None:
        """Kill the group of a process that has exited."""
        if watched := self._watched.pop(process.name, None):
            watched.has_exited = True
            self._kill_group(watched, "has exited")

    def stopped(self, process: ManagedProcess) -> None:
        """Kill a process that was stopped (SIGSTOP) for too long."""
        if watched := self._watched.get(process.name):
            self._kill(watched, "was stopped")

    def newest_heartbeat(self, name: str) -> SupervisorHeartbeat:
        """Return the last heartbeat of a running process, or an empty heartbeat."""
        watched = self._watched.get(name)
        return watched.heartbeat if watched else SupervisorHeartbeat(name, 0)

    def _receive(self) -> None:
        for _, message in self._channel.receive():
            if not isinstance(message, SupervisorHeartbeat):
                self._on_deaths(message)
            elif watched := self._find(message):
                self._on_heartbeat(watched, message)

    def _find(self, heartbeat: SupervisorHeartbeat) -> _Watched | None:
        """Return the state of a running process of this pipeline; a frame may hold any name."""
        process, watched = self._processes.get(heartbeat.name), self._watched.get(heartbeat.name)
        if watched and watched.heartbeat.pid == heartbeat.pid:
            return watched
        if process is None or not process.owns(heartbeat.pid):
            return None
        return watched or self.spawned(process)

    def _judge(self) -> None:
        """Examine silent processes, after waiting heartbeats were read."""
        due = self._timer.when() if self._timer else math.inf
        now = self._loop.time()
        self._timer = self._loop.call_at(now + self._interval, self._judge)
        self._receive()
        if now > due + MAX_LATE:
            self._lacking.clear()
        self._kill_lacking(now)
        for watched in self._watched.values():
            is_busy = watched.is_being_examined or watched.is_being_killed or watched.is_unreachable
            if now > due + MAX_LATE:
                watched.heard_at = now
            elif now - watched.heard_at > 2 * self._interval and not is_busy:
                watched.is_being_examined = True
                self._tasks.start(self._examine(watched, now))

    async def _examine(self, watched: _Watched, now: float) -> None:
        """Kill a process that has been silent for too long at time `now`."""
        known = max(watched.heartbeat.cpu_seconds, watched.cpu_seconds)
        used, is_underway = await watched.process.vitals(watched.heartbeat.pid)
        watched.cpu_seconds = max(known, used)
        watched.is_being_examined = False
        if is_underway or used > known:
            watched.worked_at = now
        silent_seconds = now - watched.heard_at  # less than 0 if a heartbeat arrived meanwhile
        idle_seconds = now - max(watched.heard_at, watched.worked_at)
        most = max(self._step_timeout, self._hang_timeout * watched.has_started)
        if silent_seconds > most:
            self._kill(watched, f"gave no sign of life for {most:g} s")
        elif watched.has_started and idle_seconds > self._hang_timeout:
            self._kill(watched, f"gave no sign of life for {self._hang_timeout:g} s")

    def _on_heartbeat(self, watched: _Watched, heartbeat: SupervisorHeartbeat) -> None:
        watched.heartbeat, watched.is_unreachable = heartbeat, False
        watched.has_started, watched.heard_at = True, self._loop.time()
        watched.process.has_started.set()
        if heartbeat.busy_seconds > self._step_timeout:
            self._kill(watched, f"has been at one step for {heartbeat.busy_seconds:.0f} s")

    def _kill_lacking(self, now: float) -> None:
        """Kill groups that have lacked ranks for too long."""
        living = Counter(watched.heartbeat.group for watched in self._watched.values())
        sizes = {
            watched.heartbeat.group: watched.heartbeat.group_size
            for watched in self._watched.values()
        }
        lacking = {group for group, size in sizes.items() if group and living[group] < size}
        self._lacking = {group: self._lacking.get(group, now) for group in lacking}
        for group, since in self._lacking.items():
            if now - since > self._hang_timeout:
                self._kill_ranks(group, "is in a group that lacks ranks")

    def _kill_group(self, lost: _Watched, reason: str) -> None:
        reason = f"is in a group with {lost.process.name}, which {reason}"
        self._kill_ranks(lost.heartbeat.group, reason, lost)

    def _kill_ranks(self, group: str, reason: str, lost: _Watched | None = None) -> None:
        for watched in self._watched.values():
            # on request, perhaps with its whole group
            is_stopped = not watched.process.wanted.is_set()
            if not group or watched is lost or watched.heartbeat.group != group or is_stopped:
                continue
            if not watched.is_being_killed:
                watched.process.killed_with_group = watched.process.pid
            self._kill(watched, reason)

    def _kill(self, watched: _Watched, reason: str) -> None:
        if not (watched.is_being_killed or watched.is_unreachable):
            watched.is_being_killed = True
            self._tasks.start(self._kill_now(watched, reason))

    async def _kill_now(self, watched: _Watched, reason: str) -> None:
        """Kill a process; if it is unreachable, kill its group, which can't wait for it."""
        if watched.has_exited:
            return
        if await watched.process.kill():
            self._say(f"{watched.process.name} {reason}; killed")
            return
        watched.is_being_killed, watched.is_unreachable = False, True
        watched.process.killed_with_group = 0
        self._say(f"{watched.process.name} {reason}; its machine can't be reached")
        self._kill_group(watched, "is unreachable")
