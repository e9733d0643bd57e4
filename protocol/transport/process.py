"""What every process of the pipeline does: start, wait on its sockets, stop."""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import zmq

from penstock.protocol.config import Config, make_run_folder
from penstock.protocol.environment import config_from_environment
from penstock.protocol.logs import JsonFormatter
from penstock.protocol.messages.supervisor import Pulse
from penstock.protocol.replicas import replica_of
from penstock.protocol.transport.channel import (
    Channel,
    connect,
    traffic,
)
from penstock.protocol.transport.discovery import network_from_environment
from penstock.protocol.transport.endpoints import Endpoints, endpoints
from penstock.protocol.transport.incarnation import Identity, take_incarnation

PROCESS_VARIABLE = "PENSTOCK_PROCESS"
SUPERVISOR_VARIABLE = "PENSTOCK_SUPERVISOR"
"""pid of the supervisor: it may end while this process is still importing"""
MAX_DESCRIPTORS = 1 << 20
"""Linux's own default maximum; containers may have a hard limit of 2**30, over which some programs
loop"""
_PR_SET_PDEATHSIG = 1


class Process:
    """One process: its name, configuration, ZeroMQ context and log.

    `identity` is one per instance, so that a message for a dead instance can't reach its
    successor.
    """

    def __init__(self, kind: str) -> None:
        self.config: Config = config_from_environment()
        given = os.environ.get(PROCESS_VARIABLE) or os.environ.get("HONCHO_PROCESS_NAME")
        self.name = given or f"{kind}.{os.getpid()}"
        self.log = logging.getLogger(kind)
        raise_descriptor_limit()
        folder = make_run_folder(self.config)
        self.incarnation = take_incarnation(folder)
        self.identity = Identity(self.name, os.getpid(), self.incarnation).encode()
        _start_log(self.config, self.name)
        _die_with_parent()
        self.network = network_from_environment(folder, self.incarnation)
        self.context: zmq.Context[Any] = self.network or zmq.Context()

    @property
    def node_id(self) -> str:
        """Of this machine; empty without a cluster."""
        return self.network.node.node_id if self.network else ""

    @property
    def host(self) -> str:
        """The address at which the other processes reach this machine."""
        return self.network.node.host if self.network else "127.0.0.1"

    @property
    def replica(self) -> int:
        """Which one it belongs to."""
        return replica_of(self.name, self.config)

    @property
    def endpoints(self) -> Endpoints:
        """The addresses of this pipeline, and of the replica that this process belongs to."""
        return endpoints(self.config, self.replica)

    @property
    def all_endpoints(self) -> list[Endpoints]:
        """Those of every replica, for a process that serves all."""
        return [endpoints(self.config, replica) for replica in range(self.config.dp)]


class PulseSender:
    """Tells the supervisor, if there is one, that this process lives. `send` is for one thread.

    With each pulse goes what the process counts: its messages, and what `counters` returned when
    `count` was called last, by names of Prometheus metrics without `penstock_process_`.
    """

    def __init__(
        self, process: Process, counters: Callable[[], dict[str, float]] = dict[str, float]
    ) -> None:
        self._name = process.name
        self._counters = counters
        self._counted: dict[str, float] = {}
        self._counters_failed = False
        self._memory = _open_memory()
        self._channel: Channel[Any] | None = None
        if SUPERVISOR_VARIABLE in os.environ:
            self._channel = connect(process.context, zmq.PUSH, process.endpoints.pulses)

    def send(self, busy_seconds: float = 0.0, group: str = "") -> None:
        """To be called every HEARTBEAT_INTERVAL."""
        if self._channel:
            counters = {
                "messages_sent_total": traffic.messages_sent,
                "messages_received_total": traffic.messages_received,
                "bad_frames_total": traffic.bad_frames,
                **self._counted,
            }
            pulse = Pulse(self._name, os.getpid(), busy_seconds, group, counters)
            times = os.times()
            pulse.cpu_seconds = times.user + times.system
            pulse.rss_bytes = _resident_bytes(self._memory)
            self._channel.send(pulse)

    def count(self) -> None:
        """Take new counters, in the thread whose they are; one that fails stops no heartbeat."""
        try:
            self._counted = self._counters()
        except Exception:
            self._counted = {}
            if not self._counters_failed:
                self._counters_failed = True
                logging.getLogger(self._name).exception("counters failed (reported once)")


def _open_memory() -> int | None:
    """Opens the kernel's numbers of this process's memory, for good: a process that has no
    descriptor left can read them. None where there is no /proc."""
    with contextlib.suppress(OSError):
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    return None


def _resident_bytes(memory: int | None) -> int:
    """Returns how much of this process is in memory; 0 where that can't be read."""
    if memory is None:
        return 0
    try:
        return int(os.pread(memory, 100, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open descriptors to the hard one, up to MAX_DESCRIPTORS.

    Each client takes a descriptor. The usual soft limit of 1,024 is for programs that use
    select(2). Children inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower maximum of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _start_log(config: Config, name: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(name))
    else:
        handler.setFormatter(logging.Formatter("%(levelname).1s %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])


def _die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (prctl(2))."""
    parent = int(os.environ.get(SUPERVISOR_VARIABLE) or os.getppid())
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
