"""Commands to the supervisor of a running pipeline, through circus's endpoint."""

from typing import Any

import msgspec
import zmq

from penstock.launch.errors import LaunchError
from penstock.launch.running import CONTROL_SOCKET, running_config
from penstock.protocol.config import run_folder
from penstock.protocol.sockets import connect

TIMEOUT = 60
"""seconds; a scale-down waits for the grace of each process that leaves"""


def command(pipeline: str, name: str, **properties: Any) -> dict[str, Any]:
    """Sends a command and waits until it is done. Raises LaunchError if it was refused."""
    running_config(pipeline)
    question = {"command": name, "properties": {**properties, "waiting": True}}
    with zmq.Context() as context:
        endpoint = f"ipc://{run_folder(pipeline)}/{CONTROL_SOCKET}"
        with connect(context, zmq.DEALER, endpoint).socket as socket:
            socket.send(msgspec.json.encode(question))
            if not socket.poll(TIMEOUT * 1000):
                raise LaunchError(f"the supervisor of {pipeline!r} does not answer")
            reply: dict[str, Any] = msgspec.json.decode(socket.recv())
    if reply["status"] != "ok":
        raise LaunchError(f"the supervisor refused {name}: {reply['reason']}")
    return reply


def scale(pipeline: str, kind: str, number: int) -> int:
    """Changes how many processes of a kind run; returns their number."""
    return int(command(pipeline, "scale", kind=kind, number=number)["number"])
