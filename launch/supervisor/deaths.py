"""Deaths of processes that poison requests explain: they do not end the pipeline."""

from collections import OrderedDict

from penstock.launch.supervisor.child import Child
from penstock.protocol.poison import (
    PoisonFound,
    PoisonList,
    ProcessesDied,
    SuspectsCleared,
)

MAX_DEATHS = 1 << 10
"""deaths whose suspects are remembered, the newest"""


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
