"""Commands to the supervisor of a running pipeline, through circus's endpoint."""

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from penstock.launch.errors import LaunchError
from penstock.launch.run_folder import CONTROL_SOCKET, running_config
from penstock.launch.supervisor.child import kind_of
from penstock.protocol.config import run_folder
from penstock.protocol.replicas import replica_of
from penstock.protocol.transport.channel import connect

TIMEOUT = 60
"""seconds"""
CHANGE_TIMEOUT = 600
"""seconds; a worker is back when it has loaded its model, and the next command waits for that"""


def command(pipeline: str, name: str, timeout: int = TIMEOUT, **properties: Any) -> dict[str, Any]:
    """Sends a command and waits until it is done. Raises LaunchError if it was refused, or the
    supervisor has ended."""
    running_config(pipeline)
    question = {"command": name, "properties": {**properties, "waiting": True}}
    with zmq.Context() as context:
        endpoint = f"ipc://{run_folder(pipeline)}/{CONTROL_SOCKET}"
        with connect(context, zmq.DEALER, endpoint).socket as socket:
            poller = zmq.Poller()
            for one in (socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)):
                poller.register(one, zmq.POLLIN)
            socket.send(msgspec.json.encode(question))
            ready = dict(poller.poll(timeout * 1000))
            socket.disable_monitor()
            if socket not in ready:
                how = "ended before it answered" if ready else f"has not answered in {timeout} s"
                raise LaunchError(f"the supervisor of {pipeline!r} {how}")
            reply: dict[str, Any] = msgspec.json.decode(socket.recv())
    if reply["status"] != "ok":
        raise LaunchError(f"the supervisor refused {name}: {reply['reason']}")
    if "error" in reply:
        raise LaunchError(reply["error"])
    return reply


def scale(pipeline: str, kind: str, number: int) -> int:
    """Changes how many processes of a kind run; returns their number."""
    return int(command(pipeline, "scale", CHANGE_TIMEOUT, kind=kind, number=number)["number"])


def restart(pipeline: str, target: str) -> Iterator[list[str]]:
    """Restarts what `target` names: a process, a kind, or `all`, one after the other.

    Workers of a replica are restarted together: their group can't lose one. Yields the names of
    those that are back. Raises LaunchError.
    """
    names = [one["name"] for one in command(pipeline, "processes")["processes"]]
    config = running_config(pipeline)

    def group(chosen: str) -> tuple[str, ...]:
        if kind_of(chosen) != "worker":
            return (chosen,)
        replica = replica_of(chosen, config)
        workers = (name for name in names if kind_of(name) == "worker")
        return tuple(name for name in workers if replica_of(name, config) == replica)

    chosen = [name for name in names if target in ("all", name, kind_of(name))]
    if not chosen:
        raise LaunchError(f"there is no process {target!r}; these run: {', '.join(names)}")
    for together in dict.fromkeys(map(group, chosen)):
        command(pipeline, "restart", CHANGE_TIMEOUT, names=list(together))
        yield list(together)
