"""Events of this process's children, from SIGCHLD: stops and continuations; orphans are collected.

Exits of known children are noticed by their pidfds. Orphans become children of this process while
it is a subreaper (prctl(2)), or if it is the first process of a container.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

_PR_SET_CHILD_SUBREAPER = 36
MAX_LATE = 1.0
"""seconds by which a timer may be late, if this process was not stopped itself"""


class ChildEvents:
    """Receiver of SIGCHLD in the running event loop of the main thread."""

    def __init__(self, max_stop: float, on_stopped: Callable[[int], None]) -> None:
        """on_stopped: called with the pid of a child that was stopped for `max_stop` seconds."""
        self._max_stop = max_stop
        self._on_stopped = on_stopped
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """of stopped children, by pid"""
        self._session = os.getsid(0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self.receive)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def receive(self) -> None:
        """Note stops and continuations, and collect orphans that have exited."""
        with contextlib.suppress(ChildProcessError):  # none runs
            while event := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG):
                if timer := self._timers.pop(event.si_pid, None):
                    timer.cancel()
                if event.si_code != os.CLD_CONTINUED:
                    self._begin(event.si_pid)
        exits = os.WEXITED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # this process has no children
            while event := os.waitid(os.P_ALL, 0, exits | os.WNOWAIT):
                if not self._is_orphan(event.si_pid):
                    break  # whoever started it collects it
                os.waitid(os.P_PID, event.si_pid, exits)

    def _begin(self, pid: int) -> None:
        due = self._loop.time() + self._max_stop
        self._timers[pid] = self._loop.call_at(due, self._judge, pid, due)

    def _judge(self, pid: int, due: float) -> None:
        """Report a child, unless all stood still; it then may have continued, too."""
        if self._loop.time() > due + MAX_LATE:
            self._begin(pid)
        else:
            del self._timers[pid]
            self._on_stopped(pid)

    def _is_orphan(self, pid: int) -> bool:
        """Return whether a process belongs to a session of one of our children."""
        return os.getsid(pid) not in (pid, self._session)


class _Subreaper:
    """Who wants orphans of this process's descendants."""

    num_holders = 0


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make this process the parent of its descendants' orphans meanwhile (Linux)."""
    prctl = ctypes.CDLL(None).prctl
    _Subreaper.num_holders += 1
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _Subreaper.num_holders -= 1
        prctl(_PR_SET_CHILD_SUBREAPER, int(_Subreaper.num_holders > 0), 0, 0, 0)
