"""Whether the processes get on: what hangs is killed, and what can't live alone.

A process sends a pulse every half second, the first one when it has started, for which it has as
long as a step may take. One that sends none (it was stopped, or is stuck) and one
that says it has been at one step for too long are killed, and restarted as any that died. When a
worker dies, so do the others of its group: they may be waiting for it in a collective. So it is
when one can't be reached, which itself is left alone then: its machine is gone, or cut off.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import zmq

from penstock.launch.processes import Host, Watched
from penstock.launch.tasks import Tasks
from penstock.protocol.config import Config
from penstock.protocol.endpoints import endpoints
from penstock.protocol.messages import Pulse
from penstock.protocol.sockets import bind

SHOWN = 40
"""characters of a name that a log line repeats"""


class LocalHost:
    """Where processes can be watched: this machine, of which only our own children count."""

    def watch(self, _name: str, pid: int, on_end: Callable[[], None]) -> "LocalProcess | None":
        """As `Host.watch`."""
        try:
            parents = psutil.Process(pid).parents()
            if os.getpid() not in (parent.pid for parent in parents):
                return None
            return LocalProcess(os.pidfd_open(pid), on_end)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return None


class LocalProcess:
    """A descriptor, which can't come to mean another process."""

    def __init__(self, descriptor: int, on_end: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._is_forgotten = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, on_end)

    async def kill(self) -> bool:
        """As `Watched.kill`; nothing happens to a process that is dead, or forgotten."""
        if not self._is_forgotten:  # its descriptor's number may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        return True

    def forget(self) -> None:
        """As `Watched.forget`."""
        self._is_forgotten = True
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


class _Guarded:
    """What is known of one process."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = repr(name)[1:-1][:SHOWN]  # whoever reaches the socket may say any name
        self.pulse = Pulse(name, pid)
        """the newest one"""
        self.alarm: asyncio.TimerHandle | None = None
        self.process: Watched
        self.is_being_killed = self.is_forgotten = False
        self.is_out_of_reach = False
        """since the newest pulse"""


class Pulses:
    """Receives the pulses of the supervisor's processes, in its event loop."""

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        host: Host,
        context: "zmq.Context[Any]",
        tasks: Tasks,
    ) -> None:
        """say: takes a line for the log; context: of the socket."""
        self._hang_timeout = config.hang_timeout
        self._step_timeout = config.step_timeout
        self._say = say
        self._host = host
        self._guarded: dict[tuple[str, int], _Guarded] = {}
        """by name and pid"""
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._channel = bind(context, zmq.PULL, endpoints(config).pulses, Pulse)
        self._fd = int(self._channel.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)
        self._receive()

    def close(self) -> None:
        """Kills nothing from here on."""
        self._tasks.cancel()
        self._loop.remove_reader(self._fd)
        self._channel.socket.close()
        for guarded in list(self._guarded.values()):
            self._forget(guarded)

    def _receive(self) -> None:
        while self._channel.socket.poll(0):  # its descriptor signals changes only
            for _, pulse in self._channel.receive():
                if guarded := self._guard(pulse.name, pulse.pid):
                    self._on_pulse(guarded, pulse)

    def spawned(self, name: str, pid: int) -> None:
        """A process begins to start, which may hang, too."""
        if guarded := self._guard(name, pid):
            self._expect(guarded, self._step_timeout)

    def newest(self, name: str, pid: int) -> Pulse:
        """What a process has said last; an empty one of a process that has said nothing."""
        guarded = self._guarded.get((name, pid))
        return guarded.pulse if guarded else Pulse(name, pid)

    def _guard(self, name: str, pid: int) -> _Guarded | None:
        """Only our own processes: none else may be killed."""
        if known := self._guarded.get((name, pid)):
            return known
        guarded = _Guarded(name, pid)
        process = self._host.watch(name, pid, partial(self._ended, guarded))
        if process is None:
            return None
        guarded.process = process
        self._guarded[name, pid] = guarded
        return guarded

    def _expect(self, guarded: _Guarded, seconds: float) -> None:
        """A pulse, within so many seconds."""
        if guarded.alarm:
            guarded.alarm.cancel()
        silent = f"gave no sign of life for {seconds:g} s"
        guarded.alarm = self._loop.call_later(seconds, self._kill, guarded, silent)

    def _on_pulse(self, guarded: _Guarded, pulse: Pulse) -> None:
        guarded.pulse, guarded.is_out_of_reach = pulse, False
        self._expect(guarded, self._hang_timeout)
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
        """A process that can't be reached lives on, perhaps: its group can't wait for it."""
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
        if guarded.alarm:
            guarded.alarm.cancel()
        guarded.is_forgotten = True
        guarded.process.forget()
