"""A thread that says how the worker gets on, also while a step keeps the main thread."""

import threading

from penstock.protocol.transport.heartbeat import AwakeClock, PulseSender
from penstock.protocol.transport.process import Process


class Watchdog:
    """Sends pulses. A process that is stopped sends none; one that is stuck says for how long."""

    def __init__(self) -> None:
        self.group = ""
        self._busy_since: float | None = None
        self._clock = AwakeClock()

    def progress(self) -> None:
        """A step begins, or goes on."""
        self._busy_since = self._clock.now()

    def rest(self) -> None:
        """There is nothing to do, or nothing whose time has a limit."""
        self._busy_since = None

    def busy_seconds(self) -> float:
        """Since the latest progress; 0 at rest."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, self._clock.now() - since)

    def start(self, process: Process) -> None:
        """Pulses come from here on, to the end of the process."""
        threading.Thread(target=self._run, args=[process], daemon=True).start()

    def _run(self, process: Process) -> None:
        sender, never = PulseSender(process), threading.Event()
        while True:
            sender.send(self.busy_seconds(), self.group)
            self._clock.wait(never)
