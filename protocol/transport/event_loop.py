"""The event loop of every process, for sockets, files, timers, heartbeats and signals."""

import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Any

import zmq

from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL, Channel
from penstock.protocol.transport.context import Context
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import tune_collector

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SLACK = 64  # cancelled timers that are kept, in addition to the number of other timers


class Timer:
    """A call that is due at a moment of `time.monotonic`."""

    __slots__ = ("due", "function")

    def __init__(self, due: float, function: Callable[[], None]) -> None:
        self.due = due
        self.function: Callable[[], None] | None = function

    def __lt__(self, other: "Timer") -> bool:
        return self.due < other.due

    def cancel(self) -> None:
        self.function = None


CallLater = Callable[[float, Callable[[], None]], Timer]


class EventLoop:
    """A loop that calls timers and handlers of channels until SIGTERM, SIGINT or `stop`.

    A handler takes messages for at most MAX_DRAIN_SECONDS (see `Channel.receive`). So other
    sockets, timers and heartbeats get their turn under any load.
    """

    def __init__(
        self,
        context: Context,
        on_heartbeat: Callable[[], None],
        heartbeats: HeartbeatThread | None = None,
        before_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a loop without channels.

        on_heartbeat: called every HEARTBEAT_INTERVAL, before `heartbeats` notes the beat;
        before_wait: called after the handlers and timers of each turn.
        """
        self._context = context
        self._on_heartbeat = on_heartbeat
        self._heartbeats = heartbeats
        self._before_wait = before_wait
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._timers: list[Timer] = []
        self._max_timers = _SLACK
        self._stopping = False

    def add(self, channel: Channel[Any], handler: Callable[[], None]) -> None:
        """Call `handler` whenever a message waits at `channel`."""
        self._poller.register(channel.socket, zmq.POLLIN)
        self._handlers[channel.socket] = handler

    def add_file(self, file: int, handler: Callable[[], None]) -> None:
        """Call `handler` once, when the file descriptor can be read or is at its end."""

        def ready() -> None:
            self._poller.unregister(file)
            del self._handlers[file]
            handler()

        self._poller.register(file, zmq.POLLIN)
        self._handlers[file] = ready

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call a function once, `seconds` from now or up to a turn later."""
        if len(self._timers) >= self._max_timers:
            self._timers = [timer for timer in self._timers if timer.function]
            heapify(self._timers)
            self._max_timers = 2 * len(self._timers) + _SLACK
        timer = Timer(monotonic() + seconds, function)
        heappush(self._timers, timer)
        return timer

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`."""
        for channel, handler in self._context.handlers:
            self.add(channel, handler)
        tune_collector()
        with self._caught_signals():
            try:
                self._beat()
                while not self._stopping:
                    self._turn()
            finally:
                if self._heartbeats:
                    self._heartbeats.stop()

    def stop(self) -> None:
        """Let `run` return after this turn."""
        self._stopping = True

    def _turn(self) -> None:
        timers = self._timers
        while timers and timers[0].due <= monotonic():
            if function := heappop(timers).function:
                function()
            timers = self._timers
        self._before_wait()
        seconds = 0.0 if self._stopping else max(0.0, self._timers[0].due - monotonic())
        for ready, _ in self._poller.poll(math.ceil(seconds * 1000)):
            self._handlers[ready]()

    def _beat(self) -> None:
        self.call_later(HEARTBEAT_INTERVAL, self._beat)
        self._on_heartbeat()
        if self._heartbeats:
            self._heartbeats.beat()

    @contextlib.contextmanager
    def _caught_signals(self) -> Iterator[None]:
        """Let a signal wake the poller through a socket, so that it interrupts no handler."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)

        def caught() -> None:
            if not set(STOP_SIGNALS).isdisjoint(reader.recv(4096)):
                self.stop()

        self._poller.register(reader.fileno(), zmq.POLLIN)
        self._handlers[reader.fileno()] = caught
        with reader, writer:
            try:
                yield
            finally:
                signal.set_wakeup_fd(-1)  # a signal may come while the process ends
