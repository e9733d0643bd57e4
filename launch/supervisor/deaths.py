"""Deaths of processes that poison requests explain: they do not end the pipeline."""

from collections import OrderedDict

from penstock.launch.supervisor.child import Child
from penstock.protocol.poison import PoisonFound, ProcessesDied

MAX_SUSPECTS = 1 << 14
"""requests whose deaths are remembered, the newest"""


class ExplainedDeaths:
    """Takes deaths back that gateway and schedulers find a reason for."""

    def __init__(self, children: dict[str, Child]) -> None:
        """children: by name."""
        self._children = children
        self._deaths: OrderedDict[bytes, set[tuple[str, int]]] = OrderedDict()
        """digest of a suspect → names and pids of those that died at work for it"""

    def handle(self, message: ProcessesDied | PoisonFound) -> None:
        """Take in what is known of deaths now."""
        match message:
            case ProcessesDied(processes, suspects):
                for digest in suspects:
                    self._deaths.setdefault(digest, set()).update(processes)
                    self._deaths.move_to_end(digest)
                while len(self._deaths) > MAX_SUSPECTS:
                    self._deaths.popitem(last=False)
            case PoisonFound(digest):
                for name, pid in self._deaths.pop(digest, ()):
                    if child := self._children.get(name):
                        child.excuse(pid)
