"""Child processes with limits of time and memory, for work that can't be interrupted."""

import contextlib
import faulthandler
import os
import resource
import signal
from collections.abc import Callable, Iterator

import psutil


def start_child(
    work: Callable[[], bytes], seconds: float, stack_bytes: int = 0, memory_bytes: int = 0
) -> tuple[int, int]:
    """Fork a child for `work`, with limits of CPU time and added memory. Return pid and pipe.

    The kernel ends a child at its limits. Raises OSError at the limit of processes, of memory or
    of descriptors.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        faulthandler.disable()  # an overflow of the stack is expected
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if stack_bytes:
            _set_limit(resource.RLIMIT_STACK, stack_bytes)
        if memory_bytes:
            _set_limit(resource.RLIMIT_AS, _num_bytes() + memory_bytes)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        with os.fdopen(writer, "wb") as file:
            file.write(work())
        status = 0
    finally:
        os._exit(status)


def end_child(pid: int, reader: int) -> tuple[int, bytes]:
    """Wait for a child. Return its exit code (negative for a signal) and its result."""
    with os.fdopen(reader, "rb") as file:
        result = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), result


@contextlib.contextmanager
def added_memory(num_bytes: int) -> Iterator[None]:
    """Limit the added memory of this process in a block. Beyond it, Python raises MemoryError."""
    before, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = _num_bytes() + num_bytes
    _set_limit(resource.RLIMIT_AS, limit if before < 0 else min(limit, before))
    try:
        yield
    finally:
        _set_limit(resource.RLIMIT_AS, before)


def _num_bytes() -> int:
    return int(psutil.Process().memory_info().vms)


def _set_limit(kind: int, number: int) -> None:
    """Set a limit, unless the hard limit is lower or the system (macOS) refuses the limit."""
    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (number, hard))
