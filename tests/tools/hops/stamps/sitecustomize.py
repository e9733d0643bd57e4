"""Stamps of a process: when it sent and received each frame over ZeroMQ.

A process that starts with this folder in `PYTHONPATH`, or is forked from one, writes its stamps to
the folder `PENSTOCK_STAMPS` when it ends.
"""

import atexit
import os
from pathlib import Path
from time import monotonic_ns, thread_time_ns
from typing import Any

import msgspec
import zmq

HEAD = 64
"""bytes of a frame, which have the type of its message"""
stamps: list[tuple[int, int, int, bool, bytes]] = []
"""when a frame was sent or received, when the call returned and the thread's CPU time then, in ns;
whether the frame was sent; its first bytes"""
_send, _recv = zmq.Socket.send, zmq.Socket.recv


def send(self: Any, data: Any, *args: Any, **options: Any) -> Any:
    """Send a frame as pyzmq does."""
    begin = monotonic_ns()  # the receiver may have the frame before the call returns
    result = _send(self, data, *args, **options)
    stamps.append((begin, monotonic_ns(), thread_time_ns(), True, bytes(memoryview(data)[:HEAD])))
    return result


def recv(self: Any, *args: Any, **options: Any) -> Any:
    """Receive a frame as pyzmq does."""
    frame = _recv(self, *args, **options)
    now = monotonic_ns()
    stamps.append((now, now, thread_time_ns(), False, bytes(memoryview(frame)[:HEAD])))
    return frame


def write(folder: Path) -> None:
    """Write this process's stamps."""
    (folder / str(os.getpid())).write_bytes(msgspec.msgpack.encode(stamps))


zmq.Socket.send, zmq.Socket.recv = send, recv  # type: ignore[method-assign]
if folder := os.environ.get("PENSTOCK_STAMPS"):
    atexit.register(write, Path(folder))
