"""What the supervisor needs of what runs processes: circus on this machine, or Ray on several.

The supervisor decides (`Policy`), they carry out and tell (`Processes`).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import zmq


class Running(NamedTuple):
    """A process that runs."""

    name: str
    pid: int
    node: str
    """name of its machine; empty where there is only this one"""
    age: float
    """seconds"""


class Policy(Protocol):
    """What is asked and told about processes, each known by its name."""

    def may_spawn(self, name: str) -> bool:
        """Before every start, also of one that has died: whether it is to be."""

    def spawned(self, name: str, pid: int, node: str = "") -> None:
        """A process begins to start; node: as in `Running`."""

    def line(self, name: str, text: str) -> None:
        """It has written a line. All are told before its end is."""

    def reaped(self, name: str, end: str) -> None:
        """It has ended; `end` continues the sentence that it died with."""

    def say(self, text: str) -> None:
        """Takes a line for the log that is of no process."""


class Watched(Protocol):
    """One process that can't come to mean another one."""

    async def works(self, since: float) -> bool:
        """Whether it has used CPU time since the last call, and more than `since` seconds of it
        since its start, or is about to; False if it is stopped, or can't be reached."""

    async def kill(self) -> bool:
        """SIGKILL, whatever it does; False if its machine can't be reached."""

    def forget(self) -> None:
        """Its end is told no more."""


class Host(Protocol):
    """Where processes can be watched and killed."""

    def watch(self, name: str, pid: int, on_end: Callable[[], None]) -> Watched | None:
        """Calls `on_end` when it ends; None if it is none of the supervisor's."""


class Processes(Protocol):
    """Starts and stops processes, each by its name."""

    @property
    def host(self) -> Host:
        """Where they can be watched."""

    @property
    def context(self) -> "zmq.Context[Any]":
        """Of sockets that connect to processes."""

    @property
    def pulses_context(self) -> "zmq.Context[Any]":
        """Of the socket that all processes connect to."""

    async def add(self, names: list[str]) -> None:
        """Starts new ones."""

    async def remove(self, names: list[str]) -> None:
        """Stops them for good."""

    async def stop(self, names: list[str]) -> None:
        """SIGTERM, and SIGKILL after a grace; `start` has them back."""

    async def start(self, names: list[str]) -> None:
        """After `stop`."""

    async def keep(self) -> None:
        """Starts again what dies, if it may; until it is cancelled."""

    def running(self) -> Iterable[Running]:
        """Those that run now."""

    def signal(self, name: str, pid: int, number: int) -> None:
        """Sends a signal; nothing happens where that process has ended."""

    async def close(self) -> None:
        """Stops all of them."""
