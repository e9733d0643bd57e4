"""Messages between `launch` commands and the supervisor of a pipeline."""

from msgspec import Struct

from penstock.protocol.messages.status import ProcessStatus


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
    """Request to send a signal, without effect where the process with this pid has ended."""

    name: str
    pid: int
    number: int


ControlRequest = ListProcesses | ScaleProcesses | RestartProcesses | SignalProcess


class ControlReply(Struct, tag=True):
    """Reply to every request."""

    error: str = ""
    """reason why the request failed"""
    processes: list[ProcessStatus] = []
    number: int = 0


class Spawned(Struct, tag=True):
    """Event: a process was started; node: as in `ProcessStatus`."""

    name: str
    pid: int
    node: str
