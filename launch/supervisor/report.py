"""Reports of the processes to the gateway, which answers status requests for the pipeline."""

import asyncio
from typing import Any

import zmq

from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.supervisor.child import Child, ExplainedDeaths
from penstock.launch.supervisor.processes import Processes, Running
from penstock.launch.supervisor.watchdog import Watchdog
from penstock.protocol.config import Config
from penstock.protocol.messages.status import ProcessStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import endpoints


class Report:
    """Sends the state of the supervisor's processes to the gateway every heartbeat."""

    def __init__(
        self,
        config: Config,
        kinds: list[str],
        processes: Processes[Any],
        children: dict[str, Child],
        watchdog: Watchdog,
        deaths: ExplainedDeaths,
    ) -> None:
        """kinds: of processes, in the order of the procfile; children: by name."""
        self._kinds = kinds
        self._processes = processes
        self._children = children
        self._watchdog = watchdog
        self._deaths = deaths
        self._loop = asyncio.get_running_loop()
        at = endpoints(config).results
        # one report waits at most for a gateway that is not there; newer ones are dropped
        self._channel = processes.context.connect(zmq.PUSH, at, max_queue=1, wait=False)
        self._is_draining = False
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._send)

    def drain(self) -> None:
        """Report from now on that the pipeline is to stop."""
        self._is_draining = True
        self._timer.cancel()
        self._send()

    def close(self) -> None:
        """Send nothing from now on."""
        self._timer.cancel()
        self._channel.socket.close(linger=0)

    def processes(self) -> list[ProcessStatus]:
        """Return the processes that run, in the order of the procfile, and their usage now."""
        order = self._kinds.index
        running = sorted(self._processes.running(), key=lambda one: order(kind_of(one.name)))
        return [self._status(one) for one in running]

    def _status(self, one: Running) -> ProcessStatus:
        pulse = self._watchdog.newest(one.name, one.pid)
        return ProcessStatus(
            name=one.name,
            pid=one.pid,
            node=one.node,
            uptime=one.age,
            restarts=self._children[one.name].num_starts - 1,
            cpu_seconds=pulse.cpu_seconds,
            rss_bytes=pulse.rss_bytes,
            counters=pulse.counters,
        )

    def _send(self) -> None:
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._send)
        poison = self._deaths.poison.digests()
        self._channel.send(SupervisorReport(self.processes(), self._is_draining, poison))
