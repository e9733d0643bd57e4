"""Owner of a pipeline: the program that runs `launch all` for itself.

It is notified when the pipeline is ready, and the pipeline ends with it.
"""

import asyncio
import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.protocol.transport.process_exit import ProcessExit

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

    PR_SET_PDEATHSIG would be of the thread that started this process.
    """
    if not (owner := int(os.environ.get(OWNER_VARIABLE, 0))):
        return
    loop = asyncio.get_running_loop()
    try:
        process = ProcessExit(owner)
    except ProcessLookupError:
        on_exit()
        return
    if os.getppid() != owner:  # it exited before, and another process may have its pid
        process.close()
        on_exit()
        return

    def exited() -> None:
        loop.remove_reader(process)
        process.close()
        on_exit()

    loop.add_reader(process, exited)


class ReadySocket:
    """The owner's end: where `notify_ready` of the process that it starts arrives."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._folder: Path | None = None
        try:
            self._socket.bind("")  # Linux makes an abstract name
            address = f"@{self._socket.getsockname()[1:].decode()}"
        except (OSError, AttributeError):
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
            address = str(self._folder / "ready")
            self._socket.bind(address)
        self.environment = {NOTIFY_VARIABLE: address, OWNER_VARIABLE: str(os.getpid())}
        """variables of the process to start"""

    def wait(self, process: "subprocess.Popen[str]") -> bool:
        """Wait until a child process is ready; False if it exits before."""
        with contextlib.closing(ProcessExit(process.pid, process.wait)) as end:
            ready, _, _ = select.select([self._socket.fileno(), end.fileno()], [], [])
        return self._socket.fileno() in ready

    def close(self) -> None:
        self._socket.close()
        if self._folder:
            shutil.rmtree(self._folder)
