"""Persistent memory, which outlives its process. The supervisor keeps its descriptors."""

import mmap
import os
import socket
from typing import NamedTuple, Self

import msgspec

from penstock.protocol.messages.supervisor import (
    DropMemory,
    KeepMemory,
    MemoryReply,
    TakeMemory,
    ToMemoryServer,
)

MEMORY_VARIABLE = "PENSTOCK_MEMORY"  # number of the inherited descriptor
MAX_MESSAGE = 1 << 20  # bytes of a message, most of them of a manifest


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
    """Return the descriptor of zeros. Raises OSError: a sandbox or RLIMIT_FSIZE may forbid it."""
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
        """Return the client of the pair that this process has inherited, None without one."""
        number = os.environ.get(MEMORY_VARIABLE)
        return cls(socket.socket(fileno=os.dup(int(number)))) if number else None

    def take(self, name: str, *, shares: bool = False) -> Taken | None:
        """Return the memory of this name; waits for its last user's exit, unless it `shares`."""
        manifest, descriptors = self._request(TakeMemory(name, shares))
        return Taken(manifest, descriptors[0]) if descriptors else None

    def keep(self, name: str, manifest: bytes, descriptor: int) -> None:
        """Pass on memory that is whole, to be taken after this process has exited."""
        self._request(KeepMemory(name, manifest), [descriptor])

    def open(self, name: str, num_bytes: int, manifest: bytes) -> mmap.mmap:
        """Return the memory of this name if its manifest is the same, otherwise zeros. Keep it.

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
        """Let memory end."""
        self._request(DropMemory(name))

    def _request(
        self, message: ToMemoryServer, descriptors: list[int] | None = None
    ) -> tuple[bytes, list[int]]:
        socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], descriptors or [])
        flags = socket.MSG_CMSG_CLOEXEC
        data, received, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 1, flags)
        if not data:
            raise ConnectionError("the supervisor has closed the socket of persistent memory")
        return msgspec.msgpack.decode(data, type=MemoryReply).manifest, received
