"""Client of the supervisor's control socket."""

from collections.abc import Iterator

import zmq

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import kind_of, stem_of
from penstock.launch.pipeline.run_folder import control_endpoint, running_config
from penstock.protocol.config import replica_of, run_folder
from penstock.protocol.messages.status import ProcessStatus
from penstock.protocol.messages.supervisor import (
    ControlReply,
    ControlRequest,
    ListProcesses,
    RestartProcesses,
    ScaleProcesses,
    SignalProcess,
)
from penstock.protocol.transport.context import Context

TIMEOUT = 60  # seconds
# seconds; a restarted worker must first load its model, and the next command waits for it
CHANGE_TIMEOUT = 600


def request(pipeline: str, message: ControlRequest, timeout: int = TIMEOUT) -> ControlReply:
    """Send a request and wait until it has been carried out.

    Raises LaunchError if the request failed or the supervisor has exited.
    """
    running_config(pipeline)
    with Context() as context:
        channel = context.connect(zmq.DEALER, control_endpoint(run_folder(pipeline)), ControlReply)
        with channel.socket as socket:
            poller = zmq.Poller()
            for polled in (socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)):
                poller.register(polled, zmq.POLLIN)
            channel.send(message)
            ready = dict(poller.poll(timeout * 1000))
            socket.disable_monitor()
            if socket not in ready:
                how = "ended before it replied" if ready else f"has not replied in {timeout} s"
                raise LaunchError(f"the supervisor of {pipeline!r} {how}")
            reply: ControlReply | None = next((message for _, message in channel.receive()), None)
    if reply is None:
        raise LaunchError(
            f"the supervisor of {pipeline!r} sent an unknown reply: it runs another version of "
            "Penstock; stop the pipeline and start it again"
        )
    if reply.error:
        raise LaunchError(reply.error)
    return reply


def list_processes(pipeline: str) -> list[ProcessStatus]:
    """Return the running processes. Raises LaunchError."""
    return request(pipeline, ListProcesses()).processes


def send_signal(pipeline: str, name: str, pid: int, number: int) -> None:
    """Send a signal to a process of the pipeline. Raises LaunchError."""
    request(pipeline, SignalProcess(name, pid, number))


def scale(pipeline: str, kind: str, number: int) -> int:
    """Change the number of processes of a kind; return the new number. Raises LaunchError."""
    return request(pipeline, ScaleProcesses(kind, number), CHANGE_TIMEOUT).number


def restart(pipeline: str, target: str) -> Iterator[list[str]]:
    """Restart a process, a kind of process, or `all` processes, one after the other.

    Workers of a replica are restarted together, since their group can't lose a worker. Yields the
    names of restarted processes once they are ready. Raises LaunchError.
    """
    names = [process.name for process in list_processes(pipeline)]
    config = running_config(pipeline)

    def group(chosen: str) -> tuple[str, ...]:
        if kind_of(chosen) != "worker":
            return (chosen,)
        its = config.of_process(chosen)
        workers = (name for name in names if stem_of(name) == f"{its.prefix}worker")
        return tuple(name for name in workers if replica_of(name, its) == replica_of(chosen, its))

    def labels(name: str) -> tuple[str, ...]:
        return "all", name, kind_of(name), stem_of(name), name.rpartition("/")[0]

    chosen = [name for name in names if target and target in labels(name)]
    if not chosen:
        raise LaunchError(f"process: got {target!r}, expected one of {', '.join(names)}")
    for together in dict.fromkeys(map(group, chosen)):
        request(pipeline, RestartProcesses(list(together)), CHANGE_TIMEOUT)
        yield list(together)
