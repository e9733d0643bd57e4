"""The runner of child processes, and SIGCHLD's reports of stops, continuations and orphans.

Actors of a Ray cluster also use the runner. The exits of known children are detected by their
pidfds. Orphans become children of this process while it is a subreaper (prctl(2)), or if it is the
first process of a container.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Self

import psutil

from penstock.launch.pipeline.procfile import shell_line
from penstock.launch.supervisor.output import Log
from penstock.protocol.transport.process import ProcessExit

# states of a process that has a CPU or waits for one, or waits for a disk
UNDERWAY = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP})
_PR_SET_CHILD_SUBREAPER = 36
MAX_LATE = 1.0  # seconds by which a timer may be late if this process itself was not stopped


class ChildProcess:
    """One run of a process, in a separate session and process group."""

    def __init__(self, pid: int, wait: Callable[[], int], log: Log) -> None:
        """Take over a child, in a running event loop.

        wait: collects the child and returns its exit code. log: the child's standard output. Raises
        OSError; the child is then killed.
        """
        self.pid = pid
        self._wait = wait
        self._log = log
        self._loop = asyncio.get_running_loop()
        # how the process ended; set after all its lines were passed on
        self.end: asyncio.Future[str] = self._loop.create_future()
        try:
            self._exit = ProcessExit(pid, wait)
        except OSError:  # no descriptors are left
            os.kill(pid, signal.SIGKILL)
            wait()
            raise
        self._loop.add_reader(self._exit, self._on_exit)

    @classmethod
    def start(
        cls,
        command: str,
        environment: Mapping[str, str],
        log: Log,
        descriptors: Mapping[str, int] = MappingProxyType({}),
    ) -> Self:
        """Start a command of the procfile.

        descriptors: environment variable → descriptor that the process inherits; the variable
        contains its number. Raises OSError.
        """
        numbers = {variable: str(number) for variable, number in descriptors.items()}
        popen = subprocess.Popen(
            ["sh", "-c", shell_line(command)],
            env={**environment, **numbers},
            stdin=subprocess.DEVNULL,
            stdout=log.writer,
            stderr=log.writer,
            start_new_session=True,
            pass_fds=tuple(descriptors.values()),
        )
        return cls(popen.pid, popen.wait, log)

    @classmethod
    def adopt(cls, pid: int, log: Log) -> Self:
        """Take over a child forked by the fork server. Raises OSError."""

        @cache  # waitpid works only once, and without pidfds a thread has already called it
        def wait() -> int:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        return cls(pid, wait, log)

    def signal(self, number: int) -> None:
        """Send a signal to the process; no effect after its end."""
        if not self.end.done():
            self._exit.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the process group; no effect after the end of the process."""
        if not self.end.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace` seconds; return when the process has ended.

        Return after another `grace` seconds if even SIGKILL did not end it (a driver that hangs).
        """
        self.signal(signal.SIGTERM)
        await asyncio.wait([self.end], timeout=grace)
        self.kill()
        await asyncio.wait([self.end], timeout=grace)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._exit)
        self._exit.close()
        try:
            how = describe_exit(self._wait())
        except ChildProcessError:
            how = "an unknown exit code: it was not a child of this process"
        self._log.finish()
        self.end.set_result(how)


def describe_exit(exit_code: int) -> str:
    """Return `signal 9` or `exit code 1`."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def vitals(pid: int) -> tuple[float, bool]:
    """Return a process's CPU seconds, and whether the process is about to use more.

    Returns (0, False) for a process that has exited or belongs to another user.
    """
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, process.status() in UNDERWAY
    except psutil.Error:
        return 0.0, False


class ChildEvents:
    """Receiver of SIGCHLD in the running event loop of the main thread."""

    def __init__(self, max_stop: float, on_stopped: Callable[[int], None]) -> None:
        """Initialize; on_stopped: receives the pid of a child stopped for `max_stop` seconds."""
        self._max_stop = max_stop
        self._on_stopped = on_stopped
        self._timers: dict[int, asyncio.TimerHandle] = {}  # timers of stopped children, by pid
        self._session = os.getsid(0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self.receive)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def receive(self) -> None:
        """Record stops and continuations, and collect orphans that have exited."""
        with contextlib.suppress(ChildProcessError):  # no child is running
            while event := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG):
                if timer := self._timers.pop(event.si_pid, None):
                    timer.cancel()
                if event.si_code != os.CLD_CONTINUED:
                    self._begin(event.si_pid)
        exits = os.WEXITED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # this process has no children
            while event := os.waitid(os.P_ALL, 0, exits | os.WNOWAIT):
                if not self._is_orphan(event.si_pid):
                    break  # collected by the code that started it
                os.waitid(os.P_PID, event.si_pid, exits)

    def _begin(self, pid: int) -> None:
        due = self._loop.time() + self._max_stop
        self._timers[pid] = self._loop.call_at(due, self._judge, pid, due)

    def _judge(self, pid: int, due: float) -> None:
        """Report a stopped child, unless the machine was suspended: the child may continue."""
        if self._loop.time() > due + MAX_LATE:
            self._begin(pid)
        else:
            del self._timers[pid]
            self._on_stopped(pid)

    def _is_orphan(self, pid: int) -> bool:
        """Return whether a process belongs to a session of a child of this process."""
        return os.getsid(pid) not in (pid, self._session)


class _Subreaper:
    """Number of holders that want to adopt orphans of this process's descendants."""

    num_holders = 0


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make this process the parent of its descendants' orphans during the block (Linux)."""
    prctl = ctypes.CDLL(None).prctl
    _Subreaper.num_holders += 1
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _Subreaper.num_holders -= 1
        prctl(_PR_SET_CHILD_SUBREAPER, int(_Subreaper.num_holders > 0), 0, 0, 0)
