"""Messages between the supervisor and the other processes."""

from msgspec import Struct

from penstock.protocol.messages.sampling import Positive
from penstock.protocol.messages.status import ProcessStatus


class Pulse(Struct, tag=True):
    """Process → supervisor: a heartbeat, with the use of resources and the running step."""

    name: str
    pid: Positive
    busy_seconds: float = 0.0
    """duration of the running step; 0 between steps"""
    group: str = ""
    """workers of one group die together: a collective can't lose a member"""
    group_size: int = 1
    """ranks of the group"""
    counters: dict[str, float] = {}
    """metrics of the process; see `ProcessStatus.counters`"""
    cpu_seconds: float = 0.0
    """user and system, since its start"""
    rss_bytes: int = 0


class SupervisorReport(Struct, tag=True):
    """Supervisor → gateway, every heartbeat; `draining`: to end when nothing is open."""

    processes: list[ProcessStatus]
    draining: bool = False
    poison: list[bytes] = []
    """digests of requests that were given up, for a gateway that has restarted"""


class ProcessesDied(Struct, tag=True):
    """Scheduler or gateway → supervisor: processes died while they worked at requests."""

    processes: list[tuple[str, int]]
    """names and pids"""
    suspects: list[bytes]
    """digests of these requests"""


class PoisonFound(Struct, tag=True):
    """Scheduler or gateway → supervisor: a poison request is given up.

    It explains every death at which it was a suspect.
    """

    digest: bytes


class SuspectsCleared(Struct, tag=True):
    """Scheduler or gateway → supervisor: suspects were processed since, and explain no death."""

    digests: list[bytes]


ToSupervisor = Pulse | ProcessesDied | PoisonFound | SuspectsCleared
