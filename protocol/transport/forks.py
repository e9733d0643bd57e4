"""Server that forks processes which have imported everything already.

A forked process is a child of the supervisor, which is the subreaper of its descendants (prctl(2)):
the process between the two exits at once.
"""

import contextlib
import gc
import os
import socket

import msgspec

from penstock.protocol.messages.supervisor import Forked, ForkRequest
from penstock.protocol.transport.process import die_with_parent
from penstock.protocol.transport.process_exit import ProcessExit

FORKS_VARIABLE = "PENSTOCK_FORKS"  # number of the inherited socket
MAX_MESSAGE = 1 << 16  # bytes
MAX_DESCRIPTORS = 8  # of one request


def serve_forks() -> str:
    """Return in each process that is forked, with the name of the service that it runs.

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
            connection, MAX_MESSAGE, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
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
    """Fork twice: return 0 in the last process, and the pid of the one between in the first.

    Return -1 if the first fork failed; the process between exits with 1 if the second one did.
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
    """Be a process as `ChildProcess` starts it."""
    parent = os.getppid()
    if parent != supervisor:  # the process between: its exit makes us the supervisor's child
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
    os.setsid()  # last: a process that dies before is collected as an orphan
