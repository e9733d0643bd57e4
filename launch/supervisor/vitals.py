"""Signs that a process works although it sends no pulses."""

import psutil

UNDERWAY = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP})
"""it has a CPU or waits for one, or waits for a disk"""


class Vitals:
    """State and CPU time of a process of this machine, as its kernel reports them."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_seconds = 0.0

    def works(self, since: float) -> bool:
        """Return whether it has used CPU time since the last call, or is about to.

        since: CPU seconds that it had used before the first call."""
        try:
            process = psutil.Process(self._pid)
            with process.oneshot():
                status, times = process.status(), process.cpu_times()
        except psutil.Error:
            return False
        before = max(since, self._cpu_seconds)
        self._cpu_seconds = times.user + times.system
        return status in UNDERWAY or self._cpu_seconds > before
