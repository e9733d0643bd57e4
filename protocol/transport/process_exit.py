"""The exit of another process, as a descriptor to wait for."""

import contextlib
import errno
import os
import select
import signal
import threading
from collections.abc import Callable

import psutil

# errors of Linux before 5.3, and of sandboxes that do not know the call
REFUSED = errno.ENOSYS, errno.EPERM


class ProcessExit:
    """A descriptor that becomes readable when a process of this machine exits.

    On Linux it is a pidfd, which can't come to mean another process. Elsewhere, and where a sandbox
    refuses that, it is a pipe, and a thread waits for the process.
    """

    def __init__(self, pid: int, wait: Callable[[], object] | None = None) -> None:
        """Open a process; wait: `Popen.wait` of a child, which only its Popen may collect.

        Raises ProcessLookupError if there is none, OSError without descriptors.
        """
        self._pid = pid
        pidfd = _open_pidfd(pid)
        self._has_pidfd = pidfd is not None
        if pidfd is not None:
            self._descriptor = pidfd
            return
        with contextlib.suppress(PermissionError):  # it is another user's
            os.kill(pid, 0)
        self._descriptor, writer = os.pipe()
        arguments = (wait or (lambda: psutil.Process(pid).wait()), writer)
        threading.Thread(target=_close_after, args=arguments, daemon=True).start()

    def fileno(self) -> int:
        return self._descriptor

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the exit, at most for `seconds`; return whether the process has exited."""
        poller = select.poll()  # select.select refuses descriptors from 1,024 on
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000))

    def send_signal(self, number: int) -> None:
        """Send a signal; without effect after the exit."""
        with contextlib.suppress(ProcessLookupError):
            if self._has_pidfd:
                signal.pidfd_send_signal(self._descriptor, number)
            elif not self.wait(0):
                os.kill(self._pid, number)

    def close(self) -> None:
        os.close(self._descriptor)


def _open_pidfd(pid: int) -> int | None:
    """Return the pidfd of a process, None without pidfds. Raises OSError."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError as error:
        if error.errno in REFUSED:
            return None
        raise


def _close_after(wait: Callable[[], object], writer: int) -> None:
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            wait()
    finally:
        os.close(writer)
