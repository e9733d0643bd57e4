"""Deaths of processes: too many end the pipeline, except those that poison requests explain."""

import time
from collections import OrderedDict, defaultdict, deque

from penstock.protocol.messages.supervisor import PoisonFound, ProcessesDied, SuspectsCleared
from penstock.protocol.poison import PoisonList

CRASH_WINDOW = 60.0  # seconds within which deaths are counted
MAX_DEATHS = 1 << 10  # deaths whose suspects are remembered, the newest


class Deaths:
    """Counts of deaths. A death that a request may explain does not count."""

    def __init__(self) -> None:
        self.poison = PoisonList()  # requests that were given up
        # name → times and pids
        self._recent: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        # name and pid → digests of the suspects that are not cleared
        self._suspects: OrderedDict[tuple[str, int], set[bytes]] = OrderedDict()

    def count(self, name: str, pid: int) -> int:
        """Count a death; return how many of this process within the window have no explanation."""
        now, recent = time.monotonic(), self._recent[name]
        recent.append((now, pid))
        while recent[0][0] < now - CRASH_WINDOW:
            recent.popleft()
        return sum((name, one) not in self._suspects for _, one in recent)

    def handle(self, message: ProcessesDied | PoisonFound | SuspectsCleared) -> None:
        match message:
            case ProcessesDied(processes, suspects):
                for death in processes:
                    self._suspects.setdefault(death, set()).update(suspects)
                while len(self._suspects) > MAX_DEATHS:
                    self._suspects.popitem(last=False)
            case SuspectsCleared(digests):
                for death, left in list(self._suspects.items()):
                    left.difference_update(digests)
                    if not left:
                        del self._suspects[death]
            case PoisonFound(digest):
                self.poison.put(digest, 1)  # it is never cleared: the death stays explained
