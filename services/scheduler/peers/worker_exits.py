"""Exits of the workers of this machine, noticed at once: their heartbeats would show them later."""

import contextlib
from collections.abc import Callable

from penstock.protocol.messages.worker import WorkerState
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.process import ProcessExit


class WorkerExits:
    """Descriptors of workers' processes in the event loop, by identity."""

    def __init__(self, loop: EventLoop, node: str, on_exit: Callable[[bytes], None]) -> None:
        """node: this machine, as `WorkerState.node`; on_exit: takes the identity of a worker."""
        self._loop = loop
        self._node = node
        self._on_exit = on_exit
        self._watched: set[bytes] = set()

    def watch(self, identity: bytes, state: WorkerState) -> None:
        """Watch a worker's process; without effect for one that is watched, or elsewhere."""
        if identity in self._watched or state.node != self._node or state.pid <= 0:
            return
        with contextlib.suppress(OSError):  # it has exited, or no descriptor is left
            process = ProcessExit(state.pid)
            self._watched.add(identity)

            def exited() -> None:
                process.close()
                self._watched.discard(identity)
                self._on_exit(identity)

            self._loop.add_file(process.fileno(), exited)
