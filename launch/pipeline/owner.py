"""Owner of a pipeline: the program that runs `launch all` for itself.

It is notified when the pipeline is ready, and the pipeline ends with it.
"""

import asyncio
import os
import select
import socket
from collections.abc import Callable

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
"""of sd_notify(3), so that systemd's `Type=notify` works as well"""
OWNER_VARIABLE = "PENSTOCK_OWNER"
"""pid of the parent process with which the pipeline ends"""


def notify_ready() -> None:
    """Send `READY=1` to the socket that the environment names, if it names one."""
    address = os.environ.get(NOTIFY_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract names
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        notifier.sendto(b"READY=1", address)


def watch_owner(on_exit: Callable[[], None]) -> None:
    """Call `on_exit` once the owner has exited; needs the running event loop.

    A pidfd is of the process; PR_SET_PDEATHSIG would be of the thread that started this one.
    """
    if not (owner := int(os.environ.get(OWNER_VARIABLE, 0))):
        return
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        on_exit()
        return
    if os.getppid() != owner:  # it exited before, and another process may have its pid
        os.close(descriptor)
        on_exit()
        return

    def exited() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        on_exit()

    loop.add_reader(descriptor, exited)


class ReadySocket:
    """The owner's end: where `notify_ready` of the process that it starts arrives."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # the kernel makes an abstract name
        name = self._socket.getsockname()[1:].decode()
        self.environment = {NOTIFY_VARIABLE: f"@{name}", OWNER_VARIABLE: str(os.getpid())}
        """variables of the process to start"""

    def wait(self, pid: int) -> bool:
        """Wait until the child process `pid` is ready; False if it exits before."""
        descriptor = os.pidfd_open(pid)
        try:
            ready, _, _ = select.select([self._socket.fileno(), descriptor], [], [])
        finally:
            os.close(descriptor)
        return self._socket.fileno() in ready

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
