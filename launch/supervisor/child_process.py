"""The one runner of child processes: on this machine, and in the actors of a Ray cluster."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Self

import psutil

from penstock.launch.pipeline.procfile import shell_line
from penstock.launch.supervisor.logs import Log
from penstock.protocol.transport.process_exit import ProcessExit

UNDERWAY = frozenset({psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP})
"""it has a CPU or waits for one, or waits for a disk"""


class ChildProcess:
    """One run of a process, in a session and process group of its own."""

    def __init__(self, pid: int, wait: Callable[[], int], log: Log) -> None:
        """Take over a child, in a running event loop; wait: collects it and returns its exit code.

        log: its standard output. Raises OSError; the child is then killed.
        """
        self.pid = pid
        self._wait = wait
        self._log = log
        self._loop = asyncio.get_running_loop()
        self.end: asyncio.Future[str] = self._loop.create_future()
        """how the process ended, set after all its lines were passed on"""
        try:
            self._exit = ProcessExit(pid, wait)
        except OSError:  # no descriptor is left
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

        descriptors: that it inherits, by the environment variables for their numbers. Raises
        OSError.
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
        """Take over a child that the fork server has forked. Raises OSError."""

        @cache  # waitpid works once, and without pidfds a thread has called it before
        def wait() -> int:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        return cls(pid, wait, log)

    def signal(self, number: int) -> None:
        """Send a signal to the process; without effect after its end."""
        if not self.end.done():
            self._exit.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the process group; without effect after the end of the process."""
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
    """Return the CPU seconds that a process has used, and whether it is about to use more.

    (0, False) for a process that has ended, or belongs to another user.
    """
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, process.status() in UNDERWAY
    except psutil.Error:
        return 0.0, False
