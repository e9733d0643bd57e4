"""Whether the processes get on: what hangs is killed, and what can't live alone.

A process sends a pulse every half second, the first one when it has started, for which it has as
long as a step may take. One that sends none (it was stopped, or is stuck) and one
that says it has been at one step for too long are killed, and restarted as any that died. When a
worker dies, so do the others of its group: they may be waiting for it in a collective.
"""

import asyncio
import os
import signal
from collections.abc import Callable

import psutil
import zmq

from penstock.protocol.config import Config
from penstock.protocol.endpoints import endpoints
from penstock.protocol.messages import Pulse
from penstock.protocol.sockets import bind

SHOWN = 40
"""characters of a name that a log line repeats"""


class Watched:
    """One process, by a descriptor that can't come to mean another one."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = repr(name)[1:-1][:SHOWN]  # whoever reaches the socket may say any name
        self.descriptor = descriptor
        self.group = ""
        self.counters: dict[str, float] = {}
        self.alarm: asyncio.TimerHandle | None = None

    def kill(self) -> None:
        """At once; nothing happens to a process that is dead."""
        try:
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return


class Pulses:
    """Receives the pulses of the supervisor's processes, in its event loop."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        """say: takes a line for the log."""
        self._hang_timeout = config.hang_timeout
        self._step_timeout = config.step_timeout
        self._say = say
        self._watched: dict[int, Watched] = {}
        """by pid"""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = bind(self._context, zmq.PULL, endpoints(config).pulses, Pulse)
        self._fd = int(self._channel.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)
        self._receive()

    def close(self) -> None:
        """Kills nothing from here on."""
        self._loop.remove_reader(self._fd)
        for pid in list(self._watched):
            self._forget(pid)
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        while self._channel.socket.poll(0):  # its descriptor signals changes only
            for _, pulse in self._channel.receive():
                if watched := self._watch(pulse.name, pulse.pid):
                    self._on_pulse(watched, pulse)

    def spawned(self, name: str, pid: int) -> None:
        """A process begins to start, which may hang, too."""
        if watched := self._watch(name, pid):
            self._expect(watched, self._step_timeout)

    def counters(self, pid: int) -> dict[str, float]:
        """What a process has said that it counts."""
        return self._watched[pid].counters if pid in self._watched else {}

    def _watch(self, name: str, pid: int) -> Watched | None:
        """Only our own processes: none else may be killed."""
        if pid in self._watched:
            return self._watched[pid]
        try:
            parents = psutil.Process(pid).parents()
            if os.getpid() not in (parent.pid for parent in parents):
                return None
            descriptor = os.pidfd_open(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return None
        watched = self._watched[pid] = Watched(name, descriptor)
        self._loop.add_reader(descriptor, self._died, pid)
        return watched

    def _expect(self, watched: Watched, seconds: float) -> None:
        """A pulse, within so many seconds."""
        if watched.alarm:
            watched.alarm.cancel()
        silent = f"gave no sign of life for {seconds:g} s"
        watched.alarm = self._loop.call_later(seconds, self._kill, watched, silent)

    def _on_pulse(self, watched: Watched, pulse: Pulse) -> None:
        watched.group = pulse.group
        watched.counters = pulse.counters
        self._expect(watched, self._hang_timeout)
        if pulse.busy_seconds > self._step_timeout:
            self._kill(watched, f"has been at one step for {pulse.busy_seconds:.0f} s")

    def _died(self, pid: int) -> None:
        gone = self._forget(pid)
        for other in self._watched.values():
            if gone.group and other.group == gone.group:
                self._kill(other, f"is in a group with {gone.name}, which is gone")

    def _kill(self, watched: Watched, reason: str) -> None:
        self._say(f"{watched.name} {reason}; killed")
        watched.kill()

    def _forget(self, pid: int) -> Watched:
        watched = self._watched.pop(pid)
        if watched.alarm:
            watched.alarm.cancel()
        self._loop.remove_reader(watched.descriptor)
        os.close(watched.descriptor)
        return watched
