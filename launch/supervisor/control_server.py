"""circus's endpoint, at which `launch status`, `scale` and `restart` ask the supervisor."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from circus.arbiter import Arbiter
from tornado.ioloop import IOLoop

from penstock.launch.run_folder import CONTROL_SOCKET

SPAWNED = b"spawned"
"""topic of what circus's second endpoint publishes of every start"""
Run = Callable[..., Awaitable[dict[str, Any]]]


class _Command:
    """A command of circus's endpoint."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def validate(self, properties: dict[str, Any]) -> None:
        """Asked for by circus; `launch` is the only one that sends these."""

    def execute(self, _arbiter: Arbiter, properties: dict[str, Any]) -> Awaitable[Any]:
        """circus answers when the task is done, if `waiting` is among the properties."""
        given = {key: value for key, value in properties.items() if key != "waiting"}
        return asyncio.ensure_future(self._run(**given))


def make_arbiter(folder: Path, commands: dict[str, Run]) -> Any:
    """An arbiter, yet without processes, that knows these commands."""
    arbiter = Arbiter(
        [],
        f"ipc://{folder}/{CONTROL_SOCKET}",
        f"ipc://{folder}/{CONTROL_SOCKET}-events",
        check_delay=-1,
        loop=IOLoop.current(),
        proc_name="launch",
    )
    arbiter.ctrl.sys_hdl.stop()  # puts our signal handlers back
    for name, run in commands.items():
        arbiter.ctrl.commands[name] = _Command(run)
    return arbiter


def tell_spawned(arbiter: Any, name: str, pid: int, node: str) -> None:
    """Tells whoever has subscribed to SPAWNED; as `Policy.spawned`."""
    told = {"name": name, "pid": pid, "node": node}
    arbiter.evpub_socket.send_multipart([SPAWNED, msgspec.json.encode(told)])
