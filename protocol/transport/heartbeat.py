"""Heartbeats: of this process to its supervisor and peers, and of the peers that registered here.

Peers follow the Paranoid Pirate pattern of the ZeroMQ guide, chapter 4: a peer registers with a
heartbeat, and any message counts as a heartbeat.
"""

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any, Generic, TypeVar

import psutil
import zmq

from penstock.protocol.messages.registration import PROTOCOL_VERSION, Heartbeat
from penstock.protocol.messages.supervisor import Pulse
from penstock.protocol.messages.worker import WorkerState
from penstock.protocol.transport.channel import (
    HEARTBEAT_INTERVAL,
    MAX_MISSED_HEARTBEATS,
    Channel,
    traffic,
)
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE, Identity, Process

log = logging.getLogger(__name__)
MAX_MISSED = 3
"""heartbeats that a thread may miss on a busy machine; if more, the process itself was stopped"""
Work = TypeVar("Work")
Counters = Callable[[], dict[str, float]]


class PulseSender:
    """Sends pulses to the supervisor, if there is one. `send` is for one thread.

    A pulse has this process's counts of messages, and what `counters` returned at the latest
    `count`, by names of Prometheus metrics without `penstock_process_`.
    """

    def __init__(self, process: Process, counters: Counters = dict[str, float]) -> None:
        self._name = process.name
        self._counters = counters
        self._counted: dict[str, float] = {}
        self._counters_failed = False
        self.group = ""
        """of a worker, as in `Pulse`"""
        self._own = psutil.Process()
        self._rss_bytes = 0
        self._channel: Channel[Any] | None = None
        if SUPERVISOR_VARIABLE in os.environ:
            self._channel = process.context.connect(zmq.PUSH, process.endpoints.pulses)

    def send(self, busy_seconds: float = 0.0) -> None:
        """Send a pulse; to be called every HEARTBEAT_INTERVAL."""
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
            pulse = Pulse(self._name, os.getpid(), busy_seconds, self.group, counters)
            pulse.cpu_seconds, pulse.rss_bytes = times.user + times.system, self._rss_bytes
            self._channel.send(pulse)

    def count(self) -> None:
        """Call `counters`, in the thread that owns them; an exception stops no heartbeat."""
        try:
            self._counted = self._counters()
        except Exception:
            self._counted = {}
            if not self._counters_failed:
                self._counters_failed = True
                logging.getLogger(self._name).exception("counters failed (reported once)")


class AwakeClock:
    """Seconds of the monotonic clock while this process was neither stopped nor suspended.

    A thread that waits for HEARTBEAT_INTERVAL at a time notices the others.
    """

    def __init__(self) -> None:
        self._lost_seconds = 0.0

    def now(self) -> float:
        return monotonic() - self._lost_seconds

    def wait(self, event: threading.Event) -> None:
        """Wait for an event, for HEARTBEAT_INTERVAL at most."""
        begin = monotonic()
        event.wait(HEARTBEAT_INTERVAL)
        self.waited(monotonic() - begin)

    def waited(self, seconds: float) -> None:
        """Note how long a wait has lasted."""
        if seconds > MAX_MISSED * HEARTBEAT_INTERVAL:
            self._lost_seconds += seconds


class HeartbeatThread:
    """A thread that sends this process's pulses, with the seconds that the main thread is busy.

    The main thread calls `beat` every HEARTBEAT_INTERVAL, as far as its work allows; the first call
    starts the thread. A worker calls `start`, then `progress` in each step and `rest` after it. A
    stopped process sends nothing; a process that is stuck at a piece of work is killed by its
    supervisor after --step-timeout.
    """

    def __init__(
        self,
        process: Process,
        counters: Counters = dict[str, float],
        to_peers: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the thread, which the first `beat` starts.

        counters: as in `PulseSender`, called by the main thread; to_peers: sends heartbeats on the
        main thread's sockets, called by this thread while the main thread is `working`.
        """
        self.sender = PulseSender(process, counters)
        self._to_peers = to_peers
        self._sockets = threading.Lock()
        self._sockets.acquire()  # the main thread's, except in `working`
        self.clock = AwakeClock()
        self._due = math.inf
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def beat(self) -> None:
        """Note that the main thread makes progress."""
        self.sender.count()
        self._due = self.clock.now() + HEARTBEAT_INTERVAL
        if self._thread.ident is None:
            self.start()

    def start(self) -> None:
        self._thread.start()

    def progress(self) -> None:
        """Note the progress of work that has a time limit."""
        self._due = self.clock.now()

    def rest(self) -> None:
        """Note that the main thread is idle, or that its work has no time limit."""
        self._due = math.inf

    @property
    def busy_seconds(self) -> float:
        """Seconds by which the main thread's beat is late; 0 if less than an interval."""
        late = self.clock.now() - self._due
        return late if late > HEARTBEAT_INTERVAL else 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Wrap long work that uses no socket; meanwhile this thread sends heartbeats to peers.

        A lock passes the sockets on: libzmq demands a memory barrier where another thread uses a
        socket.
        """
        self._sockets.release()
        try:
            yield
        finally:
            self._sockets.acquire()

    def stop(self) -> None:
        """End the thread, before its context is destroyed."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.sender.send(self.busy_seconds)
            if self._to_peers and self._sockets.acquire(blocking=False):
                try:
                    self._to_peers()
                finally:
                    self._sockets.release()
            self.clock.wait(self._stopped)


class Peer(Generic[Work]):
    """A process that registered, and its work by key."""

    def __init__(self, identity: bytes, name: str) -> None:
        self.identity = identity
        self.name = name
        self.work: dict[object, Work] = {}
        self.num_missed = 0
        """heartbeats of this process since the peer's latest message"""


class Peers(Generic[Work]):
    """All peers of one kind, by identity."""

    def __init__(self) -> None:
        self._peers: dict[bytes, Peer[Work]] = {}

    def __iter__(self) -> Iterator[Peer[Work]]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, identity: bytes | None) -> Peer[Work] | None:
        return self._peers.get(identity) if identity else None

    def alive(self, identity: bytes, name: str) -> bool:
        """Note a message of a peer. Return True if it is the first one."""
        known = self._peers.get(identity)
        if known is None:
            self._peers[identity] = Peer(identity, name)
            return True
        known.num_missed = 0
        return False

    def lost(self, identity: bytes) -> list[Work]:
        """Remove a peer. Return its work."""
        peer = self._peers.pop(identity, None)
        return list(peer.work.values()) if peer else []

    def silent(self) -> list[bytes]:
        """Return peers that missed MAX_MISSED_HEARTBEATS heartbeats; called at each heartbeat.

        Heartbeats are counted, not seconds: while this process itself is stopped, nobody is late.
        """
        for peer in self._peers.values():
            peer.num_missed += 1
        return [peer.identity for peer in self if peer.num_missed > MAX_MISSED_HEARTBEATS]

    def least_loaded(self) -> Peer[Work] | None:
        """Return the peer with the least work; None if there is no peer."""
        return min(self._peers.values(), key=lambda peer: len(peer.work), default=None)


def predecessors(identity: bytes, of: Iterable[bytes]) -> list[bytes]:
    """Return those identities that are earlier incarnations of a process: it has died since."""
    new = Identity.decode(identity)
    known = [(Identity.decode(one), one) for one in of]
    return [one for old, one in known if old.name == new.name and old.incarnation < new.incarnation]


def refusal(message: Heartbeat | WorkerState) -> str | None:
    """Return, and log, why a process that registers is refused; None if it is not."""
    if message.version == PROTOCOL_VERSION:
        return None
    reason = (
        f"{message.name} speaks version {message.version} of the protocol; "
        f"this pipeline speaks version {PROTOCOL_VERSION}"
    )
    log.warning("refused: %s", reason)
    return reason
