"""Reports of a process to the supervisor: heartbeats, and deaths at requests."""

import contextlib
import logging
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import psutil
import zmq

from penstock.protocol.messages.supervisor import (
    PoisonFound,
    ProcessesDied,
    SupervisorHeartbeat,
    SuspectsCleared,
)
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL, Channel, traffic
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE, Process

Counters = Callable[[], dict[str, float]]


class HeartbeatSender:
    """Sender of heartbeats to the supervisor, if the process has one. `send` is for one thread.

    A heartbeat contains this process's counts of messages, and the result of `counters` at the
    latest `count`. The names are those of Prometheus metrics without `penstock:process_`.
    """

    def __init__(self, process: Process, counters: Counters = dict[str, float]) -> None:
        self._name = process.name
        self._counters = counters
        self._counted: dict[str, float] = {}
        self._counters_failed = False
        self.group, self.group_size = "", 1  # for workers, as in `SupervisorHeartbeat`
        self._own = psutil.Process()
        self._rss_bytes = 0
        self._channel: Channel[Any] | None = None
        if SUPERVISOR_VARIABLE in os.environ:
            self._channel = process.context.connect(zmq.PUSH, process.endpoints.supervisor)

    def send(self, busy_seconds: float = 0.0) -> None:
        """Send a heartbeat; to be called every HEARTBEAT_INTERVAL."""
        if self._channel:
            counters = {
                "messages_sent_total": traffic.messages_sent,
                "messages_received_total": traffic.messages_received,
                "bad_frames_total": traffic.bad_frames,
                **self._counted,
            }
            times = os.times()
            with contextlib.suppress(OSError):  # no descriptor is free
                self._rss_bytes = self._own.memory_info().rss
            beat = SupervisorHeartbeat(self._name, os.getpid(), busy_seconds)
            beat.group, beat.group_size = self.group, self.group_size
            beat.counters = counters
            beat.cpu_seconds, beat.rss_bytes = times.user + times.system, self._rss_bytes
            self._channel.send(beat)

    def count(self) -> None:
        """Call `counters` in the thread that owns them. An exception does not stop heartbeats."""
        try:
            self._counted = self._counters()
        except Exception:
            self._counted = {}
            if not self._counters_failed:
                self._counters_failed = True
                logging.getLogger(self._name).exception("counters failed (reported once)")


# heartbeats that the thread may miss on a busy machine; after more, the process itself was stopped
MAX_MISSED = 3


class LentSockets:
    """Context of long work that uses no socket: meanwhile another thread may send heartbeats.

    A lock guards the sockets: libzmq demands a memory barrier between threads that share a socket.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()  # held by the main thread, except within the context

    def __enter__(self) -> None:
        self.lock.release()

    def __exit__(self, *_: object) -> None:
        self.lock.acquire()


class HeartbeatThread:
    """A thread that sends this process's heartbeats, with the main thread's busy time.

    The main thread calls `beat` every HEARTBEAT_INTERVAL, if its work allows; the first call starts
    the thread. A worker calls `start`, then `progress` in each step and `rest` after the step. A
    stopped process sends no heartbeats, and the time does not count. The supervisor kills a process
    that is stuck at its work, without `progress` or a change of `work`, after --step-timeout.
    """

    def __init__(
        self,
        process: Process,
        counters: Counters = dict[str, float],
        to_peers: Callable[[], None] | None = None,
        work: Callable[[], int] = int,
    ) -> None:
        """Prepare the thread, which the first `beat` starts.

        counters: as in `HeartbeatSender`, called by the main thread. to_peers: function that sends
        heartbeats on the main thread's sockets; this thread calls it while the main thread is in
        `working`. work: a number that changes while the main thread gets on; this thread reads it.
        """
        self.sender = HeartbeatSender(process, counters)
        self._to_peers = to_peers
        self.working = LentSockets()
        # this thread writes these, the main thread writes `_due`
        self._lost_seconds, self._work, self._seen, self._worked_at = 0.0, work, 0, -math.inf
        self._due = math.inf
        self._is_stopped = False
        self._called, self._sent = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def beat(self) -> None:
        self.sender.count()
        self._due = self._now() + HEARTBEAT_INTERVAL
        if self._thread.ident is None:
            self.start()

    def start(self) -> None:
        self._thread.start()

    def report(self) -> None:
        """Send a heartbeat at once; return when it is sent. Without the thread, do nothing."""
        if not self._thread.is_alive():
            return
        self._sent.clear()
        self._called.set()
        self._sent.wait()

    def progress(self) -> None:
        """Note the progress of work that has a time limit."""
        self._due = self._now()

    def rest(self) -> None:
        """Note that the main thread is idle, or that its work has no time limit."""
        self._due = math.inf

    @property
    def busy_seconds(self) -> float:
        """Seconds by which the main thread's beat is late; 0 if less than an interval."""
        late = self._now() - max(self._due, self._worked_at)
        return late if late > HEARTBEAT_INTERVAL else 0.0

    def look(self) -> None:
        """Note whether the main thread's work has got on since the last look."""
        seen, self._seen = self._seen, self._work()
        if seen != self._seen:
            self._worked_at = self._now()

    def stop(self) -> None:
        """End the thread, before its context is destroyed."""
        self._is_stopped = True
        self._called.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            if is_called := self._called.is_set():
                self._called.clear()  # not if a call has come since
            self.look()
            self.sender.send(self.busy_seconds)
            if is_called:
                self._sent.set()
            if self._to_peers and self.working.lock.acquire(blocking=False):
                try:
                    self._to_peers()
                finally:
                    self.working.lock.release()
            begin = monotonic()
            self._called.wait(HEARTBEAT_INTERVAL)
            self.waited(monotonic() - begin)

    def _now(self) -> float:
        """Return the time in seconds, without times when this process was stopped or suspended."""
        return monotonic() - self._lost_seconds

    def waited(self, seconds: float) -> None:
        """Note how long this thread has waited for HEARTBEAT_INTERVAL, or less."""
        if seconds > MAX_MISSED * HEARTBEAT_INTERVAL:
            self._lost_seconds += seconds


MAX_SUSPECTS = 1 << 14  # newest requests whose deaths are remembered


class DeathReports:
    """Sender of suspects to the supervisor, if any: requests that may have killed processes."""

    def __init__(self, process: Process) -> None:
        # digests that were reported and not cleared, the newest
        self.suspects: OrderedDict[bytes, None] = OrderedDict()
        self._channel: Channel[None] | None = None
        if SUPERVISOR_VARIABLE in os.environ:
            self._channel = process.context.connect(zmq.PUSH, process.endpoints.supervisor)

    def died(self, processes: list[tuple[str, int]], suspects: list[bytes]) -> None:
        if self._channel and processes and suspects:
            self._channel.send(ProcessesDied(processes, suspects))
            self.suspects |= dict.fromkeys(suspects)
            while len(self.suspects) > MAX_SUSPECTS:
                self.suspects.popitem(last=False)

    def clear(self, digests: Iterable[bytes]) -> None:
        """Report cleared requests as `SuspectsCleared`, if they were suspects."""
        cleared = [digest for digest in digests if self.suspects.pop(digest, digest) is None]
        if self._channel and cleared:
            self._channel.send(SuspectsCleared(cleared))

    def found(self, digest: bytes) -> None:
        if self._channel:
            self._channel.send(PoisonFound(digest))
