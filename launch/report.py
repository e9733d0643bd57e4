"""What the gateway is told of the processes: it answers for all of the pipeline."""

import asyncio

import psutil
import zmq
from circus.arbiter import Arbiter

from penstock.launch.child import Child, kind_of
from penstock.launch.pulses import Pulses
from penstock.protocol.config import Config
from penstock.protocol.endpoints import endpoints
from penstock.protocol.messages import SupervisorReport
from penstock.protocol.sockets import HEARTBEAT_INTERVAL, connect
from penstock.protocol.status import ProcessStatus


class Report:
    """Sends the state of the supervisor's processes to the gateway every heartbeat."""

    def __init__(
        self,
        config: Config,
        kinds: list[str],
        arbiter: Arbiter,
        children: dict[str, Child],
        pulses: Pulses,
    ) -> None:
        """kinds: of processes, in the order of the procfile; children: by name."""
        self._kinds = kinds
        self._arbiter = arbiter
        self._children = children
        self._pulses = pulses
        self._known: dict[int, psutil.Process] = {}
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        at = endpoints(config).results
        # one report waits at most for a gateway that is not there; newer ones are dropped
        self._channel = connect(self._context, zmq.PUSH, at, max_queue=1)
        self._send()

    def close(self) -> None:
        """Tells nothing from here on."""
        self._timer.cancel()
        self._context.destroy(linger=0)

    def processes(self) -> list[ProcessStatus]:
        """Those that run, in the order of the procfile, and what they use now."""
        known, self._known = self._known, {}
        return [one for one in self._running() if self._measure(one, known.get(one.pid))]

    def _running(self) -> list[ProcessStatus]:
        order = self._kinds.index
        return [
            ProcessStatus(
                name=watcher.name,
                pid=process.pid,
                uptime=process.age(),
                restarts=self._children[watcher.name].num_starts - 1,
                counters=self._pulses.counters(process.pid),
            )
            for watcher in sorted(self._arbiter.watchers, key=lambda one: order(kind_of(one.name)))
            for process in watcher.processes.values()
        ]

    def _measure(self, one: ProcessStatus, known: psutil.Process | None) -> bool:
        """False for a process that is gone."""
        try:
            process = known or psutil.Process(one.pid)
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
        except psutil.NoSuchProcess:
            return False
        one.cpu_seconds, one.rss_bytes = times.user + times.system, memory.rss
        self._known[one.pid] = process
        return True

    def _send(self) -> None:
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._send)
        self._channel.send(SupervisorReport(self.processes()))
