"""Heartbeats of the worker from a thread, which continue during a step."""

import threading

from penstock.protocol.transport.heartbeat import AwakeClock, PulseSender
from penstock.protocol.transport.process import Process


class Heartbeat:
    """Sender of pulses. A stopped process sends none; a stuck process reports for how long."""

    def __init__(self) -> None:
        self.group = ""
        self._busy_since: float | None = None
        self._clock = AwakeClock()

    def progress(self) -> None:
        """Note the progress of a step."""
        self._busy_since = self._clock.now()

    def rest(self) -> None:
        """Note that the worker is idle, or that its work has no time limit."""
        self._busy_since = None

    def busy_seconds(self) -> float:
        """Return the seconds since the latest progress, 0 if idle."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, self._clock.now() - since)

    def start(self, process: Process) -> None:
        """Send pulses until the process ends."""
        threading.Thread(target=self._run, args=[process], daemon=True).start()

    def _run(self, process: Process) -> None:
        sender, never = PulseSender(process), threading.Event()
        while True:
            sender.send(self.busy_seconds(), self.group)
            self._clock.wait(never)
