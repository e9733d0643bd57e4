"""Socket pairs of the supervisor and a process: persistent memory, and forks.

The supervisor keeps the descriptors of memory that outlives its process. A fork server has imported
everything already. Each process that it forks becomes a child of the supervisor, the subreaper of
its descendants (prctl(2)), because the intermediate process exits at once.
"""

import contextlib
import gc
import mmap
import os
import socket
from typing import NamedTuple, Self

import msgspec

from penstock.protocol.messages.supervisor import (
    DropMemory,
    Forked,
    ForkRequest,
    KeepMemory,
    MemoryReply,
    TakeMemory,
    ToMemoryServer,
)
from penstock.protocol.transport.process import ProcessExit, die_with_parent

MEMORY_VARIABLE = "PENSTOCK_MEMORY"  # number of the inherited descriptor
MAX_MEMORY_MESSAGE = 1 << 20  # bytes, most of them for the manifest


class Taken(NamedTuple):
    """Memory of an earlier process."""

    manifest: bytes
    descriptor: int


def socket_pair() -> tuple[socket.socket, socket.socket] | None:
    """Return the supervisor's end and a process's end; None where memory can't be persistent."""
    if not hasattr(os, "memfd_create"):
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def create_memory(num_bytes: int) -> int:
    """Return the descriptor of zeros. Raises OSError: a sandbox or RLIMIT_FSIZE may refuse it."""
    descriptor = os.memfd_create("penstock")
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class MemoryClient:
    """A process's end of its socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def from_environment(cls) -> Self | None:
        """Return the client of the socket pair that this process inherited; None without a pair."""
        number = os.environ.get(MEMORY_VARIABLE)
        return cls(socket.socket(fileno=os.dup(int(number)))) if number else None

    def take(self, name: str, *, shares: bool = False) -> Taken | None:
        """Return the memory of this name. Without `shares`, wait for the exit of its last user."""
        manifest, descriptors = self._request(TakeMemory(name, shares))
        return Taken(manifest, descriptors[0]) if descriptors else None

    def keep(self, name: str, manifest: bytes, descriptor: int) -> None:
        """Keep complete memory, which another process can take after this process has exited."""
        self._request(KeepMemory(name, manifest), [descriptor])

    def open(self, name: str, num_bytes: int, manifest: bytes) -> mmap.mmap:
        """Return the kept memory of this name with this manifest, or zeros, which are then kept.

        Raises OSError.
        """
        taken = self.take(name)
        if taken and taken.manifest == manifest:
            descriptor = taken.descriptor
        else:
            if taken:
                os.close(taken.descriptor)
            descriptor = create_memory(num_bytes)
            self.keep(name, manifest, descriptor)
        memory = mmap.mmap(descriptor, num_bytes)
        os.close(descriptor)
        return memory

    def drop(self, name: str) -> None:
        """Release the memory of this name."""
        self._request(DropMemory(name))

    def _request(
        self, message: ToMemoryServer, descriptors: list[int] | None = None
    ) -> tuple[bytes, list[int]]:
        socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], descriptors or [])
        flags = socket.MSG_CMSG_CLOEXEC
        data, received, _, _ = socket.recv_fds(self._socket, MAX_MEMORY_MESSAGE, 1, flags)
        if not data:
            raise ConnectionError("the supervisor has closed the socket of persistent memory")
        return msgspec.msgpack.decode(data, type=MemoryReply).manifest, received


FORKS_VARIABLE = "PENSTOCK_FORKS"  # number of the inherited socket
MAX_FORK_MESSAGE = 1 << 16  # bytes
MAX_DESCRIPTORS = 8  # descriptors of one request


def serve_forks() -> str:
    """Return in each forked process, with the name of the service that the process runs.

    The caller has started neither threads nor CUDA.
    """
    die_with_parent()
    supervisor = os.getppid()
    connection = socket.socket(fileno=int(os.environ.pop(FORKS_VARIABLE)))
    os.set_inheritable(connection.fileno(), False)
    gc.collect()
    gc.freeze()  # the collector would write to pages that all forked processes share
    connection.send(msgspec.msgpack.encode(Forked()))
    while True:
        data, descriptors, _, _ = socket.recv_fds(
            connection, MAX_FORK_MESSAGE, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            os._exit(0)
        request = msgspec.msgpack.decode(data, type=ForkRequest)
        between = _fork()
        if between == 0:
            _become(request, descriptors, supervisor)
            connection.send(msgspec.msgpack.encode(Forked(os.getpid())))
            connection.close()
            return request.service
        for descriptor in descriptors:
            os.close(descriptor)
        if between < 0 or os.waitpid(between, 0)[1] != 0:
            connection.send(msgspec.msgpack.encode(Forked()))


def _fork() -> int:
    """Fork twice: return 0 in the grandchild, and the pid of the child in this process.

    Return -1 if the first fork failed; the child exits with 1 if the second fork failed.
    """
    try:
        between = os.fork()
        if between:
            return between
    except OSError:
        return -1
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    return 0


def _become(request: ForkRequest, descriptors: list[int], supervisor: int) -> None:
    """Set up this process as `ChildProcess` starts processes."""
    parent = os.getppid()
    if parent != supervisor:  # the intermediate process: its exit makes us the supervisor's child
        with contextlib.suppress(ProcessLookupError):
            between = ProcessExit(parent)
            between.wait()
            between.close()
    output, *others = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(request.environment)
    for variable, descriptor in zip(request.inherited, others, strict=True):
        os.environ[variable] = str(descriptor)
    os.setsid()  # last: a process that dies before this is reaped as an orphan
