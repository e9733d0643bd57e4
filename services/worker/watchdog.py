"""A thread that says how the worker gets on, also while a step keeps the main thread."""

import threading
from time import monotonic

from penstock.protocol.process import Process, PulseSender
from penstock.protocol.sockets import HEARTBEAT_INTERVAL

MAX_MISSED = 3
"""heartbeats that this thread may miss on a busy machine"""


class Watchdog:
    """Sends pulses. A process that is stopped sends none; one that is stuck says for how long."""

    def __init__(self) -> None:
        self.group = ""
        self._busy_since: float | None = None
        self._lost_seconds = 0.0
        """for which this process did not run: they count for no step"""

    def progress(self) -> None:
        """A step begins, or goes on."""
        self._busy_since = self._now()

    def rest(self) -> None:
        """There is nothing to do, or nothing whose time has a limit."""
        self._busy_since = None

    def busy_seconds(self) -> float:
        """Since the latest progress; 0 at rest."""
        since = self._busy_since
        return 0.0 if since is None else self._now() - since

    def start(self, process: Process) -> None:
        """Pulses come from here on, to the end of the process."""
        threading.Thread(target=self._run, args=[process], daemon=True).start()

    def _run(self, process: Process) -> None:
        sender, never = PulseSender(process), threading.Event()
        while True:
            sender.send(self.busy_seconds(), self.group)
            begin = monotonic()
            never.wait(HEARTBEAT_INTERVAL)
            self.waited(monotonic() - begin)

    def waited(self, seconds: float) -> None:
        """Takes how long one wait of HEARTBEAT_INTERVAL was; much longer, if all stood still."""
        if seconds > MAX_MISSED * HEARTBEAT_INTERVAL:
            self._lost_seconds += seconds

    def _now(self) -> float:
        return monotonic() - self._lost_seconds
