"""Records of the supervisor about one process, over its restarts."""

import time
from collections import OrderedDict, deque

from penstock.launch.supervisor.logs import NUM_LAST_LINES, Show
from penstock.protocol.messages.supervisor import PoisonFound, ProcessesDied, SuspectsCleared
from penstock.protocol.poison import PoisonList

GRACE = 5.0
"""seconds between SIGTERM and SIGKILL"""
CRASH_WINDOW = 60.0
"""seconds within which deaths are counted"""
MAX_DEATHS = 1 << 10
"""deaths whose suspects are remembered, the newest"""


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


class ExplainedDeaths:
    """Deaths that a request may explain. They do not count as long as a suspect is not cleared."""

    def __init__(self, children: dict[str, Child]) -> None:
        """children: by name."""
        self.poison = PoisonList()
        """requests that were given up"""
        self._children = children
        self._suspects: OrderedDict[tuple[str, int], set[bytes]] = OrderedDict()
        """name and pid → digests of the suspects that are not cleared"""

    def handle(self, message: ProcessesDied | PoisonFound | SuspectsCleared) -> None:
        """Update which deaths count."""
        match message:
            case ProcessesDied(processes, suspects):
                for death in processes:
                    self._suspects.setdefault(death, set()).update(suspects)
                    self._excuse(death, True)
                while len(self._suspects) > MAX_DEATHS:
                    self._suspects.popitem(last=False)
            case SuspectsCleared(digests):
                for death, left in list(self._suspects.items()):
                    left.difference_update(digests)
                    if not left:
                        del self._suspects[death]
                        self._excuse(death, False)
            case PoisonFound(digest):
                self.poison.put(digest, 1)  # it is never cleared: the death stays explained

    def _excuse(self, death: tuple[str, int], is_excused: bool) -> None:
        name, pid = death
        if child := self._children.get(name):
            child.excuse(pid, is_excused)
