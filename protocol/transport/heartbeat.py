"""Heartbeats while the main thread works: slow work is not silence."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from time import monotonic

from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.process import Process, PulseSender

MAX_MISSED = 3
"""heartbeats that a thread may miss on a busy machine; more if the process itself stood still"""


class AwakeClock:
    """Seconds of the monotonic clock without those in which this process stood still (it was
    stopped, or its machine suspended): these count for no piece of work.

    They are seen by a thread that waits for HEARTBEAT_INTERVAL at a time.
    """

    def __init__(self) -> None:
        self._lost_seconds = 0.0

    def now(self) -> float:
        """Returns the time."""
        return monotonic() - self._lost_seconds

    def wait(self, event: threading.Event) -> None:
        """Waits for an event, for HEARTBEAT_INTERVAL at most."""
        begin = monotonic()
        event.wait(HEARTBEAT_INTERVAL)
        self.waited(monotonic() - begin)

    def waited(self, seconds: float) -> None:
        """Takes for how long a wait has lasted."""
        if seconds > MAX_MISSED * HEARTBEAT_INTERVAL:
            self._lost_seconds += seconds


class HeartbeatThread:
    """Sends this process's pulses, and says in them for how long the main thread has been busy.

    The main thread calls `beat` every HEARTBEAT_INTERVAL, as near as its work allows; the first
    call starts the thread. A process that is stopped sends nothing; one that is stuck at a piece
    of work is killed by its supervisor after --step-timeout.
    """

    def __init__(
        self,
        process: Process,
        counters: Callable[[], dict[str, float]] = dict[str, float],
        to_peers: Callable[[], None] | None = None,
    ) -> None:
        """counters: as of `PulseSender`, called by the main thread; to_peers: sends heartbeats on
        the main thread's sockets, called by this thread while the main thread is at `working`."""
        self._sender = PulseSender(process, counters)
        self._to_peers = to_peers
        self._sockets = threading.Lock()
        self._sockets.acquire()  # the main thread's, except in `working`
        self.clock = AwakeClock()
        self._due = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def beat(self) -> None:
        """Note that the main thread gets on."""
        self._sender.count()
        self._due = self.clock.now() + HEARTBEAT_INTERVAL
        if self._thread.ident is None:
            self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Seconds by which the main thread's beat is late; 0 if it is less than an interval."""
        late = self.clock.now() - self._due
        return late if late > HEARTBEAT_INTERVAL else 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Wraps work that may take long and touches no socket: peers hear heartbeats meanwhile.

        A lock hands the sockets over, which is the memory barrier that libzmq demands for the use
        of a socket by another thread.
        """
        self._sockets.release()
        try:
            yield
        finally:
            self._sockets.acquire()

    def stop(self) -> None:
        """End the thread, before the context of its sockets is destroyed."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._sender.send(self.busy_seconds)
            if self._to_peers and self._sockets.acquire(blocking=False):
                try:
                    self._to_peers()
                finally:
                    self._sockets.release()
            self.clock.wait(self._stopped)
