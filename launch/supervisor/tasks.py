"""Tasks of an event loop of which none fails unseen."""

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

OnError = Callable[[BaseException], None]


class Tasks:
    """The one way in which the supervisor starts tasks: it holds them until they end."""

    def __init__(self, on_error: OnError) -> None:
        """on_error: takes every exception that ends a task, except its cancellation."""
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def wait(self) -> None:
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_error(error)


def traceback_lines(error: BaseException) -> list[str]:
    """Format an exception for a log."""
    return "".join(traceback.format_exception(error)).rstrip().splitlines()
