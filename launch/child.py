"""What the supervisor remembers of one process, over its restarts."""

import time
from collections import deque

from penstock.launch.logs import Log

CRASH_WINDOW = 60.0
"""seconds within which deaths are counted"""


class Child:
    """One process of the pipeline by its name."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.deaths: deque[float] = deque()
        self.num_starts = 0
        self.exit_code: int | None = None
        self.asked_for = False
        """its next start was asked for, so no death is behind it"""

    def count_death(self) -> int:
        """How often it died within the window, this time included."""
        now = time.monotonic()
        self.deaths.append(now)
        while self.deaths[0] < now - CRASH_WINDOW:
            self.deaths.popleft()
        return len(self.deaths)

    @property
    def end(self) -> str:
        """How it ended the last time."""
        if self.exit_code is not None and self.exit_code < 0:
            return f"signal {-self.exit_code}"
        return f"exit code {self.exit_code}"


def kind_of(name: str) -> str:
    """The procfile's word for a process: `worker` for `worker.2`."""
    return name.partition(".")[0]
