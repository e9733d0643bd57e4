"""Heartbeats of this process: a thread that sends them to the supervisor."""

import math
import threading
from collections.abc import Callable
from time import monotonic

from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.process import Process
from penstock.protocol.transport.supervisor_heartbeat import Counters, HeartbeatSender

# heartbeats that the thread may miss on a busy machine; if more, the process itself was stopped
MAX_MISSED = 3


class LentSockets:
    """Context of long work that uses no socket: meanwhile another thread may send heartbeats.

    A lock passes the sockets on: libzmq demands a memory barrier between threads that use one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()  # the main thread's, except within the context

    def __enter__(self) -> None:
        self.lock.release()

    def __exit__(self, *_: object) -> None:
        self.lock.acquire()


class HeartbeatThread:
    """A thread that sends this process's heartbeats, with the seconds that the main thread is busy.

    The main thread calls `beat` every HEARTBEAT_INTERVAL, as far as its work allows; the first call
    starts the thread. A worker calls `start`, then `progress` in each step and `rest` after it. A
    stopped process sends nothing, and the time does not count; a process that is stuck at a piece
    of work is killed by its supervisor after --step-timeout.
    """

    def __init__(
        self,
        process: Process,
        counters: Counters = dict[str, float],
        to_peers: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the thread, which the first `beat` starts.

        counters: as in `HeartbeatSender`, called by the main thread; to_peers: sends heartbeats on
        the main thread's sockets, called by this thread while the main thread is in `working`.
        """
        self.sender = HeartbeatSender(process, counters)
        self._to_peers = to_peers
        self.working = LentSockets()
        self._lost_seconds = 0.0  # this thread writes it, the main thread writes `_due`
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
        late = self._now() - self._due
        return late if late > HEARTBEAT_INTERVAL else 0.0

    def stop(self) -> None:
        """End the thread, before its context is destroyed."""
        self._is_stopped = True
        self._called.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            is_called = self._called.is_set()
            self._called.clear()
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
        """Return seconds, without those in which this process was stopped or suspended."""
        return monotonic() - self._lost_seconds

    def waited(self, seconds: float) -> None:
        """Note how long this thread has waited for HEARTBEAT_INTERVAL, or less."""
        if seconds > MAX_MISSED * HEARTBEAT_INTERVAL:
            self._lost_seconds += seconds
