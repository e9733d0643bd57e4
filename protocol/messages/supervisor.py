"""Messages between the supervisor and the other processes."""

from msgspec import Struct

from penstock.protocol.messages.sampling import Positive
from penstock.protocol.messages.status import ProcessStatus


class Pulse(Struct, tag=True):
    """To the supervisor: a process lives, and how it gets on."""

    name: str
    pid: Positive
    busy_seconds: float = 0.0
    """how long it has been at one step; 0 between steps"""
    group: str = ""
    """workers of one group die together: a collective can't lose a member"""
    counters: dict[str, float] = {}
    """what the process counts about itself, for metrics; see `ProcessStatus.counters`"""
    cpu_seconds: float = 0.0
    """user and system, since its start"""
    rss_bytes: int = 0


class SupervisorReport(Struct, tag=True):
    """Supervisor → gateway, every heartbeat; `draining`: to end when nothing is open."""

    processes: list[ProcessStatus]
    draining: bool = False
    poison: list[bytes] = []
    """digests of requests that were given up, for a gateway that has restarted"""
