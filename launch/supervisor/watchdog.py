"""Watchdog over the processes: it kills what hangs, and what depends on a dead process.

A process sends a pulse every half second, the first one when it has started, for which it has as
long as a step may take. One that sends none is killed when it was stopped, or has used no CPU time
for the hang timeout; as long as it uses some (a call of C that holds the interpreter's lock) it has
as long as a step. One that says it has been at one step for too long is killed as well. All are
restarted as any that died. When a worker dies, so do the others of its group: they may be waiting
for it in a collective. The same happens when a worker is unreachable; the worker itself is left
alone, because its machine may be cut off.

A supervisor that did not run itself (all of the machine stood still) can't know who was silent: all
have their time once more.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial

import zmq

from penstock.launch.supervisor.processes import Host, Watched
from penstock.launch.supervisor.tasks import Tasks
from penstock.protocol.config import Config
from penstock.protocol.messages.supervisor import (
    PoisonFound,
    ProcessesDied,
    Pulse,
    SuspectsCleared,
    ToSupervisor,
)
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import Context, endpoints

MAX_LATE = 2 * HEARTBEAT_INTERVAL
"""seconds by which the supervisor's own timer may be late, if it was not stopped itself"""
SHOWN = 40
"""characters of a name that a log line repeats"""


class _Guarded:
    """State of one process."""

    def __init__(self, name: str, pid: int, now: float) -> None:
        """now: as by the event loop's clock, as all times."""
        self.name = repr(name)[1:-1][:SHOWN]  # whoever reaches the socket may say any name
        self.pulse = Pulse(name, pid)
        """the newest one"""
        self.has_started = False
        """it has sent one"""
        self.heard_at = now
        """the time of the newest pulse; at first, of the start"""
        self.worked_at = now
        """the latest time at which it was seen to use a CPU since then"""
        self.process: Watched
        self.is_being_examined = self.is_being_killed = self.is_forgotten = False
        self.is_out_of_reach = False
        """since the newest pulse"""

    @property
    def may_be_examined(self) -> bool:
        """Return whether an examination is possible and not running."""
        return not (self.is_being_examined or self.is_being_killed or self.is_out_of_reach)


class Watchdog:
    """Receives the pulses of the supervisor's processes, in its event loop."""

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        host: Host,
        context: Context,
        tasks: Tasks,
        on_deaths: Callable[[ProcessesDied | PoisonFound | SuspectsCleared], None] = lambda _: None,
    ) -> None:
        """Bind the socket.

        say: takes a line for the log; on_deaths: called with messages about deaths.
        """
        self._on_deaths = on_deaths
        self._hang_timeout = config.hang_timeout
        self._step_timeout = config.step_timeout
        self._say = say
        self._host = host
        self._guarded: dict[tuple[str, int], _Guarded] = {}
        """by name and pid"""
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._channel = context.bind(zmq.PULL, endpoints(config).pulses, ToSupervisor)
        self._fd = int(self._channel.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)
        self._interval = min(HEARTBEAT_INTERVAL, self._hang_timeout / 4)
        self._judge()

    def close(self) -> None:
        """Kills nothing from here on."""
        if self._timer:
            self._timer.cancel()
        self._tasks.cancel()
        self._loop.remove_reader(self._fd)
        self._channel.socket.close()
        for guarded in list(self._guarded.values()):
            self._forget(guarded)

    def _receive(self) -> None:
        while self._channel.has_message:  # its descriptor signals changes only
            for _, message in self._channel.receive():
                if not isinstance(message, Pulse):
                    self._on_deaths(message)
                elif guarded := self._guard(message.name, message.pid):
                    self._on_pulse(guarded, message)

    def spawned(self, name: str, pid: int) -> None:
        """Watch a process from its start, which may hang, too."""
        self._guard(name, pid)

    def newest(self, name: str, pid: int) -> Pulse:
        """Return the last pulse of a process, an empty one without any."""
        guarded = self._guarded.get((name, pid))
        return guarded.pulse if guarded else Pulse(name, pid)

    def _guard(self, name: str, pid: int) -> _Guarded | None:
        """Only our own processes: none else may be killed."""
        if known := self._guarded.get((name, pid)):
            return known
        guarded = _Guarded(name, pid, self._loop.time())
        process = self._host.watch(name, pid, partial(self._ended, guarded))
        if process is None:
            return None
        guarded.process = process
        self._guarded[name, pid] = guarded
        return guarded

    def _judge(self) -> None:
        """Examine who is silent, after the pulses that wait were read."""
        due = self._timer.when() if self._timer else math.inf
        now = self._loop.time()
        self._timer = self._loop.call_at(now + self._interval, self._judge)
        self._receive()
        for guarded in self._guarded.values():
            if now > due + MAX_LATE:
                guarded.heard_at = now
            elif now - guarded.heard_at > 2 * self._interval and guarded.may_be_examined:
                guarded.is_being_examined = True
                self._tasks.start(self._examine(guarded, now))

    async def _examine(self, guarded: _Guarded, now: float) -> None:
        """Kills a process that was silent for too long at the time `now`."""
        works = await guarded.process.works(guarded.pulse.cpu_seconds)
        guarded.is_being_examined = False
        if works:
            guarded.worked_at = now
        silent_seconds = now - guarded.heard_at  # less than 0 if a pulse has come meanwhile
        idle_seconds = now - max(guarded.heard_at, guarded.worked_at)
        most = max(self._step_timeout, self._hang_timeout * guarded.has_started)
        if silent_seconds > most:
            self._kill(guarded, f"gave no sign of life for {most:g} s")
        elif guarded.has_started and idle_seconds > self._hang_timeout:
            self._kill(guarded, f"gave no sign of life for {self._hang_timeout:g} s")

    def _on_pulse(self, guarded: _Guarded, pulse: Pulse) -> None:
        guarded.pulse, guarded.is_out_of_reach = pulse, False
        guarded.has_started, guarded.heard_at = True, self._loop.time()
        if pulse.busy_seconds > self._step_timeout:
            self._kill(guarded, f"has been at one step for {pulse.busy_seconds:.0f} s")

    def _ended(self, gone: _Guarded) -> None:
        self._forget(gone)
        self._kill_group(gone, "gone")

    def _kill_group(self, gone: _Guarded, how: str) -> None:
        group = gone.pulse.group
        for other in self._guarded.values():
            if group and other is not gone and other.pulse.group == group:
                self._kill(other, f"is in a group with {gone.name}, which is {how}")

    def _kill(self, guarded: _Guarded, reason: str) -> None:
        if not (guarded.is_being_killed or guarded.is_out_of_reach):
            guarded.is_being_killed = True
            self._tasks.start(self._kill_now(guarded, reason))

    async def _kill_now(self, guarded: _Guarded, reason: str) -> None:
        """Kill a process; if it is unreachable, kill its group, which can't wait for it."""
        if guarded.is_forgotten:  # it has ended meanwhile
            return
        if await guarded.process.kill():
            self._say(f"{guarded.name} {reason}; killed")
            return
        guarded.is_being_killed, guarded.is_out_of_reach = False, True
        self._say(f"{guarded.name} {reason}; its machine can't be reached")
        self._kill_group(guarded, "out of reach")

    def _forget(self, guarded: _Guarded) -> None:
        del self._guarded[guarded.pulse.name, guarded.pulse.pid]
        guarded.is_forgotten = True
        guarded.process.forget()
