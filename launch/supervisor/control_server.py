"""Server of the supervisor's control socket, to which `launch` commands connect."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import zmq

from penstock.launch.pipeline.run_folder import control_endpoint
from penstock.launch.supervisor.tasks import Tasks
from penstock.protocol.messages.control import ControlReply, ControlRequest, ListProcesses, Spawned
from penstock.protocol.transport.context import Context, drain
from penstock.protocol.transport.event_loop import attend, leave

Run = Callable[[ControlRequest], Coroutine[Any, Any, ControlReply]]


class ControlServer:
    """Runs requests at once, each in a task, and replies when they are done."""

    def __init__(self, folder: Path, run: Run, end: "asyncio.Future[int]", tasks: Tasks) -> None:
        """Bind the socket in the run folder `folder`.

        end: done when the pipeline is to end, which ends requests, too; tasks: reports exceptions.
        """
        self._run = run
        self._end = end
        self._tasks = tasks
        self._watchers: set[bytes] = set()
        self._context: Context = Context()
        self._channel = self._context.bind(zmq.ROUTER, control_endpoint(folder), ControlRequest)
        self._handlers = [(self._channel, self._receive)]
        attend(self._handlers)

    def spawned(self, event: Spawned) -> None:
        """Send an event to the peers that watch."""
        self._watchers = {peer for peer in self._watchers if self._channel.send(event, peer)}
        drain(self._handlers)  # sending may have consumed what the descriptor signals

    async def close(self) -> None:
        """Send the last replies, and close the socket; `end` is done."""
        await self._tasks.wait()
        leave(self._handlers)
        self._channel.socket.close()
        self._context.term()

    def _receive(self) -> None:
        for peer, request in self._channel.receive():
            if isinstance(request, ListProcesses) and request.watch:
                self._watchers.add(peer)
            self._tasks.start(self._answer(peer, request))

    async def _answer(self, peer: bytes, request: ControlRequest) -> None:
        task = asyncio.create_task(self._run(request))
        either: list[asyncio.Future[Any]] = [task, self._end]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._reply(peer, ControlReply("the pipeline ended before the command was done"))
        elif error := task.exception():
            self._reply(peer, ControlReply(f"the command failed: {error!r}"))
            raise error
        else:
            self._reply(peer, task.result())

    def _reply(self, peer: bytes, reply: ControlReply) -> None:
        self._channel.send(reply, peer)
        drain(self._handlers)
