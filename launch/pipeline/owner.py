"""Owner of a pipeline: the program that runs `launch all` for its own use.

The owner is notified when the pipeline is ready. The pipeline ends with its owner.
"""

import asyncio
import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Callable

from penstock.protocol.transport.process import ProcessExit

NOTIFY_VARIABLE = "NOTIFY_SOCKET"  # variable of sd_notify(3), for systemd's `Type=notify`
OWNER_VARIABLE = "PENSTOCK_OWNER"  # pid of the parent process; the pipeline ends with it
READY_VARIABLE = "PENSTOCK_READY"  # file descriptor of the pipe to the owner


def notify_ready() -> None:
    """Notify the owner and systemd, if the environment names them."""
    if descriptor := os.environ.pop(READY_VARIABLE, ""):
        with os.fdopen(int(descriptor), "wb", 0) as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(b"1")
    address = os.environ.get(NOTIFY_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract socket names
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        notifier.sendto(b"READY=1", address)


def watch_owner(on_exit: Callable[[], None]) -> None:
    """Call `on_exit` once the owner has exited; requires a running event loop.

    PR_SET_PDEATHSIG would follow the thread that started this process, not the owner's process.
    """
    if not (owner := int(os.environ.get(OWNER_VARIABLE, 0))):
        return
    loop = asyncio.get_running_loop()
    try:
        process = ProcessExit(owner)
    except ProcessLookupError:
        on_exit()
        return
    if os.getppid() != owner:  # the owner has exited before, and another process may have its pid
        process.close()
        on_exit()
        return

    def exited() -> None:
        loop.remove_reader(process)
        process.close()
        on_exit()

    loop.add_reader(process, exited)


class ReadyPipe:
    """Owner's end of the pipe into which `notify_ready` of its child process writes.

    The pipe has no name in a file system, so a killed owner leaves nothing.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        # `write` is passed to the process to be started
        self._read, self.write = os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)
        # variables of the process to be started
        self.environment = {
            READY_VARIABLE: str(write),
            OWNER_VARIABLE: str(os.getpid()),
            NOTIFY_VARIABLE: "",  # the owner's variable; the owner may be a service
        }

    def wait(self, process: "subprocess.Popen[str]") -> bool:
        """Wait until a child process is ready; False if it exits before."""
        self.write.close()
        with contextlib.closing(ProcessExit(process.pid, process.wait)) as end:
            # a fork of this process may hold `write`, so the pipe may stay open after the exit
            readable, _, _ = select.select([self._read.fileno(), end.fileno()], [], [])
        return self._read.fileno() in readable and bool(self._read.read(1))

    def close(self) -> None:
        self.write.close()
        self._read.close()
