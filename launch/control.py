"""Commands to the supervisor of a running pipeline, through circus's endpoint."""

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from penstock.launch.child import kind_of
from penstock.launch.errors import LaunchError
from penstock.launch.running import CONTROL_SOCKET, running_config
from penstock.protocol.config import run_folder
from penstock.protocol.replicas import replica_of
from penstock.protocol.sockets import connect

TIMEOUT = 60
"""seconds; a scale-down waits for the grace of each process that leaves"""
RESTART_TIMEOUT = 600
"""seconds; a worker is back when it has loaded its model"""


def command(pipeline: str, name: str, timeout: int = TIMEOUT, **properties: Any) -> dict[str, Any]:
    """Sends a command and waits until it is done. Raises LaunchError if it was refused."""
    running_config(pipeline)
    question = {"command": name, "properties": {**properties, "waiting": True}}
    with zmq.Context() as context:
        endpoint = f"ipc://{run_folder(pipeline)}/{CONTROL_SOCKET}"
        with connect(context, zmq.DEALER, endpoint).socket as socket:
            socket.send(msgspec.json.encode(question))
            if not socket.poll(timeout * 1000):
                raise LaunchError(f"the supervisor of {pipeline!r} does not answer")
            reply: dict[str, Any] = msgspec.json.decode(socket.recv())
    if reply["status"] != "ok":
        raise LaunchError(f"the supervisor refused {name}: {reply['reason']}")
    return reply


def scale(pipeline: str, kind: str, number: int) -> int:
    """Changes how many processes of a kind run; returns their number."""
    return int(command(pipeline, "scale", kind=kind, number=number)["number"])


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
        if not command(pipeline, "restart", RESTART_TIMEOUT, names=list(together))["back"]:
            raise LaunchError(f"pipeline {pipeline!r} ended before {', '.join(together)} was back")
        yield list(together)
