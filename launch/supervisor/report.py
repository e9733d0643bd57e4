"""Reports of the processes to the gateway, which answers status requests for the pipeline."""

import asyncio
import time

import zmq

from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.supervisor.processes import ManagedProcess, Processes
from penstock.launch.supervisor.watchdog import Watchdog
from penstock.protocol.config import Config
from penstock.protocol.messages.status import ProcessStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.poison import PoisonList
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import endpoints


class Report:
    """Sends the state of the supervisor's processes to the gateway every heartbeat."""

    def __init__(
        self,
        config: Config,
        kinds: list[str],
        processes: Processes,
        watchdog: Watchdog,
        poison: PoisonList,
    ) -> None:
        """kinds: of processes, in the order of the procfile."""
        self.kinds = kinds
        self._processes = processes
        self._watchdog = watchdog
        self._poison = poison
        self._loop = asyncio.get_running_loop()
        at = endpoints(config.by_model()[0]).results
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
        self._timer.cancel()
        self._channel.socket.close(linger=0)

    def processes(self) -> list[ProcessStatus]:
        """Return the processes that run, in the order of the procfile, and their usage now."""
        running = [one for one in self._processes.by_name.values() if one.pid]
        running.sort(key=lambda one: self.kinds.index(kind_of(one.name)))
        return [self._status(one) for one in running]

    def _status(self, process: ManagedProcess) -> ProcessStatus:
        heartbeat = self._watchdog.newest_heartbeat(process.name)
        return ProcessStatus(
            name=process.name,
            pid=process.pid,
            node=process.node,
            uptime=time.monotonic() - process.started_at,
            restarts=process.num_starts - 1,
            cpu_seconds=heartbeat.cpu_seconds,
            rss_bytes=heartbeat.rss_bytes,
            counters=heartbeat.counters,
        )

    def _send(self) -> None:
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._send)
        digests = self._poison.digests()
        self._channel.send(SupervisorReport(self.processes(), self._is_draining, digests))
