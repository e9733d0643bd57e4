"""A Python without what only Linux has. It stands in for macOS, on which nothing here was run."""

import ctypes
import fcntl
import os
import pathlib
import resource
import signal
import socket
import termios
import time
from typing import Any

MACOS_MAX_DESCRIPTORS = 10_240
for module, names in (
    (os, ("pidfd_open", "sched_getaffinity", "sched_setaffinity", "eventfd", "memfd_create")),
    (signal, ("pidfd_send_signal",)),
    (socket, ("TCP_INFO", "SO_PEERCRED", "SO_PASSCRED")),
    (time, ("CLOCK_BOOTTIME",)),
):
    for name in names:
        delattr(module, name)


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


class _Socket(socket.socket):
    def bind(self, address: Any) -> None:
        if self.family == socket.AF_UNIX and address[:1] in ("", b"", "\0", b"\0"):
            raise FileNotFoundError(2, "no abstract names")
        super().bind(address)


def _ioctl(fd: Any, request: int, *more: Any) -> Any:
    if request == termios.TIOCOUTQ:
        raise OSError(25, "not of a socket")
    return fcntl_ioctl(fd, request, *more)


def _setrlimit(kind: int, limits: tuple[int, int]) -> None:
    if kind in (resource.RLIMIT_AS, resource.RLIMIT_STACK):
        raise ValueError("current limit exceeds maximum limit")
    if kind == resource.RLIMIT_NOFILE and limits[0] > MACOS_MAX_DESCRIPTORS:
        raise ValueError("not allowed to raise maximum limit")
    resource_setrlimit(kind, limits)


def _open(self: pathlib.Path, *arguments: Any, **named: Any) -> Any:
    if self.parts[:2] == ("/", "proc"):
        raise FileNotFoundError(2, "no /proc", str(self))
    return path_open(self, *arguments, **named)


fcntl_ioctl, fcntl.ioctl = fcntl.ioctl, _ioctl  # type: ignore[assignment]
resource_setrlimit, resource.setrlimit = resource.setrlimit, _setrlimit
path_open, pathlib.Path.open = pathlib.Path.open, _open  # type: ignore[assignment, method-assign]
ctypes.CDLL = _Library  # type: ignore[misc]
socket.socket = _Socket  # type: ignore[misc]
