"""Messages between the supervisor and processes, `launch` commands and fork servers.

On the socket pairs of persistent memory and of forks, one message at a time waits for its reply.
"""

from msgspec import Struct

from penstock.protocol.messages.sampling import Positive
from penstock.protocol.messages.status import ProcessStatus


class SupervisorHeartbeat(Struct, tag=True):
    """Process → supervisor: a heartbeat, with the use of resources and the running step."""

    name: str
    pid: Positive
    busy_seconds: float = 0.0  # duration of the running step; 0 between steps
    group: str = ""  # workers of one group die together: a collective can't lose a member
    group_size: int = 1  # ranks of the group
    counters: dict[str, float] = {}  # metrics of the process; see `ProcessStatus.counters`
    cpu_seconds: float = 0.0  # user and system, since its start
    rss_bytes: int = 0


class SupervisorReport(Struct, tag=True):
    """Supervisor → gateway, every heartbeat; `draining`: to end once no request is open."""

    processes: list[ProcessStatus]
    draining: bool = False
    # digests of requests that were given up, for a gateway that has restarted
    poison: list[bytes] = []


class ProcessesDied(Struct, tag=True):
    """Scheduler or gateway → supervisor: processes died while they worked at requests."""

    processes: list[tuple[str, int]]  # names and pids
    suspects: list[bytes]  # digests of these requests


class PoisonFound(Struct, tag=True):
    """Scheduler or gateway → supervisor: a poison request is given up.

    The request explains every death at which it was a suspect.
    """

    digest: bytes


class SuspectsCleared(Struct, tag=True):
    """Scheduler or gateway → supervisor: suspects were processed since, and explain no death."""

    digests: list[bytes]


ToSupervisor = SupervisorHeartbeat | ProcessesDied | PoisonFound | SuspectsCleared


class ListProcesses(Struct, tag=True):
    """Request for `ControlReply.processes`.

    With `watch` the supervisor also sends a `Spawned` after every later start.
    """

    watch: bool = False


class ScaleProcesses(Struct, tag=True):
    """Request to run `number` processes of a kind; `ControlReply.number` is their number then."""

    kind: str
    number: int


class RestartProcesses(Struct, tag=True):
    """Request to restart processes of one kind together; the reply comes when they are ready."""

    names: list[str]


class SignalProcess(Struct, tag=True):
    """Request to send a signal, without effect if the process with this pid has exited."""

    name: str
    pid: int
    number: int


ControlRequest = ListProcesses | ScaleProcesses | RestartProcesses | SignalProcess


class ControlReply(Struct, tag=True):
    """Reply to every request."""

    error: str = ""  # reason why the request failed
    processes: list[ProcessStatus] = []
    number: int = 0


class Spawned(Struct, tag=True):
    """Event: a process was started; node: as in `ProcessStatus`."""

    name: str
    pid: int
    node: str


class TakeMemory(Struct, tag=True):
    """Process → supervisor: pass on the memory of this name, once its last user has exited."""

    name: str
    # share the memory read-only while its user still runs; it is taken before it is written
    shares: bool = False


class KeepMemory(Struct, tag=True):
    """Process → supervisor: keep this memory, whose descriptor comes with the message."""

    name: str
    manifest: bytes  # the contents, for the process that takes the memory


class DropMemory(Struct, tag=True):
    """Process → supervisor: close the memory of this name."""

    name: str


class MemoryReply(Struct, tag=True):
    """Supervisor → process; the descriptor of memory that was taken comes with the message."""

    manifest: bytes = b""  # empty if no memory has this name


ToMemoryServer = TakeMemory | KeepMemory | DropMemory


class ForkRequest(Struct, array_like=True):
    """Supervisor → fork server: fork a process. Its descriptors come with the message.

    The first descriptor is the process's standard output and error.
    """

    service: str
    environment: dict[str, str]  # changes to the fork server's own
    inherited: list[str]  # environment variables that hold the numbers of the other descriptors


class Forked(Struct, array_like=True):
    """Forked process → supervisor; fork server → supervisor when it is ready or can't fork."""

    pid: int = 0  # 0: the fork server is ready, or no process was forked
