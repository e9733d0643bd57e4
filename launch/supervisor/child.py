"""Records of the supervisor about one process, over its restarts."""

import time
from collections import deque
from collections.abc import Iterable

from penstock.launch.supervisor.logs import NUM_LAST_LINES, Show
from penstock.protocol.config import Config

GRACE = 5.0
"""seconds between SIGTERM and SIGKILL"""
CRASH_WINDOW = 60.0
"""seconds within which deaths are counted"""


class Child:
    """One process of the pipeline by its name."""

    def __init__(self, show: Show) -> None:
        self.show = show
        """how its lines are printed"""
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.pid = 0
        """of the process that was started last"""
        self._deaths: deque[tuple[float, int]] = deque()
        """when which pid died"""
        self._excused: deque[int] = deque(maxlen=64)
        self.num_starts = 0
        self.end = ""
        """how it ended the last time"""
        self.asked_for = False
        """its next start was requested, so no death precedes it"""

    def count_death(self) -> int:
        """Return how often it died within the window for no known reason, this time included."""
        now = time.monotonic()
        self._deaths.append((now, self.pid))
        while self._deaths[0][0] < now - CRASH_WINDOW:
            self._deaths.popleft()
        return sum(pid not in self._excused for _, pid in self._deaths)

    def excuse(self, pid: int, is_excused: bool = True) -> None:
        """Stop counting the death of its process with this pid, or count it again."""
        if is_excused:
            self._excused.append(pid)
        while not is_excused and pid in self._excused:
            self._excused.remove(pid)


def process_names(config: Config, kinds: Iterable[str]) -> list[str]:
    """Return the names of all processes at start."""
    numbers = {
        "scheduler": config.dp,
        "worker": (config.tp + config.spare_workers) * config.dp,
        "tokenizer": config.tokenizers,
        "detokenizer": config.detokenizers,
        "http": config.http,
    }
    return [f"{kind}.{i}" for kind in kinds for i in range(1, numbers.get(kind, 1) + 1)]


def kind_of(name: str) -> str:
    """Return the procfile's word for a process: `worker` for `worker.2`."""
    return name.partition(".")[0]
