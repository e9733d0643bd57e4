"""Server of memory that outlives its process: it holds descriptors and knows no contents.

GPU memory lasts as long as any descriptor of it, without a CUDA context. When the supervisor ends,
in whatever way, no descriptor is left and the memory is free.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from penstock.launch.supervisor.tasks import Tasks
from penstock.protocol.messages.supervisor import (
    DropMemory,
    KeepMemory,
    MemoryReply,
    TakeMemory,
    ToMemoryServer,
)
from penstock.protocol.transport.socket_pairs import MAX_MEMORY_MESSAGE

# in which the last user of memory must have exited, or the memory is dropped
MAX_EXIT_SECONDS = 5.0
# ends of processes that have written nothing wrong before; a shell reports crashes as 128 + N
ORDERLY = ("exit code 0", "exit code 1", "signal 9", "signal 15")


class _Peer(NamedTuple):
    socket: socket.socket
    end: "asyncio.Future[str]"  # how the process ended


class _Region(NamedTuple):
    manifest: bytes
    descriptor: int
    user: "asyncio.Future[str]"  # the end of the process that uses it, or used it last


class MemoryServer:
    """Persistent memory by name, in the running event loop."""

    def __init__(self, tasks: Tasks, say: Callable[[str], None]) -> None:
        """tasks: reports exceptions. say: takes a line for the log."""
        self._tasks = tasks
        self._say = say
        self._regions: dict[str, _Region] = {}
        self._peers: set[_Peer] = set()

    def serve(self, connection: socket.socket, end: "asyncio.Future[str]") -> None:
        """Serve a process over its socket pair; end: of the process."""
        peer = _Peer(connection, end)
        self._peers.add(peer)
        asyncio.get_running_loop().add_reader(connection, self._receive, peer)

    def close(self) -> None:
        for peer in list(self._peers):
            self._leave(peer)
        for name in list(self._regions):
            self._drop(name)

    def _receive(self, peer: _Peer) -> None:
        descriptors: list[int] = []
        try:
            flags = socket.MSG_CMSG_CLOEXEC
            data, descriptors, _, _ = socket.recv_fds(peer.socket, MAX_MEMORY_MESSAGE, 1, flags)
            message = msgspec.msgpack.decode(data, type=ToMemoryServer) if data else None
        except (OSError, msgspec.DecodeError):
            message = None
        match message:
            case TakeMemory(name, shares=True):
                self._reply(peer, self._regions.get(name))
            case TakeMemory(name):
                self._tasks.start(self._pass_on(name, peer))
            case KeepMemory(name, manifest) if descriptors:
                self._drop(name)
                self._regions[name] = _Region(manifest, descriptors.pop(), peer.end)
                self._reply(peer)
            case DropMemory(name):
                self._drop(name)
                self._reply(peer)
            case _:
                self._leave(peer)
        for one in descriptors:  # that no message may have
            os.close(one)

    async def _pass_on(self, name: str, peer: _Peer) -> None:
        """Reply with the memory, if its last user has exited and can't have damaged it."""
        while (region := self._regions.get(name)) and region.user is not peer.end:
            await asyncio.wait([region.user], timeout=MAX_EXIT_SECONDS)
            if self._regions.get(name) is not region:
                continue  # dropped, or passed on to another process
            how = region.user.result() if region.user.done() else "no exit"
            if how in ORDERLY:
                self._regions[name] = region._replace(user=peer.end)
            else:
                self._say(f"memory {name} is not used again: its process ended with {how}")
                self._drop(name)
        self._reply(peer, region)

    def _reply(self, peer: _Peer, region: _Region | None = None) -> None:
        """Reply, with memory if there is some to pass on."""
        reply = MemoryReply(region.manifest if region else b"")
        descriptors = [region.descriptor] if region else []
        try:
            socket.send_fds(peer.socket, [msgspec.msgpack.encode(reply)], descriptors)
        except OSError:  # it has exited
            self._leave(peer)

    def _drop(self, name: str) -> None:
        if region := self._regions.pop(name, None):
            os.close(region.descriptor)

    def _leave(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            asyncio.get_running_loop().remove_reader(peer.socket)
            peer.socket.close()
