"""The start of every process of the pipeline, and a handle on the exit of other processes.

A process begins with its configuration, identity, context and log.
"""

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import psutil
from setproctitle import setproctitle

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config, config_from_environment, make_run_folder, replica_of
from penstock.protocol.transport.context import Context, Endpoints, endpoints

# errors of pidfd_open in Linux before 5.3, and in sandboxes that do not know the call
REFUSED = errno.ENOSYS, errno.EPERM


class ProcessExit:
    """A descriptor that becomes readable when a process of this machine exits.

    On Linux the descriptor is a pidfd, which never refers to another process. Elsewhere, and in
    sandboxes that refuse pidfds, the descriptor is a pipe, and a thread waits for the process.
    """

    def __init__(self, pid: int, wait: Callable[[], object] | None = None) -> None:
        """Open a process. wait: `Popen.wait` of a child, because only its Popen may reap it.

        Raises ProcessLookupError without such a process, and OSError if no descriptor is free.
        """
        self._pid = pid
        pidfd = _open_pidfd(pid)
        self._has_pidfd = pidfd is not None
        if pidfd is not None:
            self._descriptor = pidfd
            return
        with contextlib.suppress(PermissionError):  # the process is another user's
            os.kill(pid, 0)
        self._descriptor, writer = os.pipe()
        arguments = (wait or (lambda: psutil.Process(pid).wait()), writer)
        threading.Thread(target=_close_after, args=arguments, daemon=True).start()

    def fileno(self) -> int:
        return self._descriptor

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the exit, at most for `seconds`; return whether the process has exited."""
        poller = select.poll()  # select.select refuses descriptors from 1,024 on
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000))

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing after the exit."""
        with contextlib.suppress(ProcessLookupError):
            if self._has_pidfd:
                signal.pidfd_send_signal(self._descriptor, number)
            elif not self.wait(0):
                os.kill(self._pid, number)

    def close(self) -> None:
        os.close(self._descriptor)


def _open_pidfd(pid: int) -> int | None:
    """Return the pidfd of a process, None without pidfds. Raises OSError."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError as error:
        if error.errno in REFUSED:
            return None
        raise


def _close_after(wait: Callable[[], object], writer: int) -> None:
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            wait()
    finally:
        os.close(writer)


PROCESS_VARIABLE = "PENSTOCK_PROCESS"
# pid of the supervisor, which may exit while this process is still importing
SUPERVISOR_VARIABLE = "PENSTOCK_SUPERVISOR"
# number that the supervisor assigns; a process that is started later has a larger number
INCARNATION_VARIABLE = "PENSTOCK_INCARNATION"
# path of the file that describes a machine of a cluster: a `discovery.Node` as JSON
NODE_VARIABLE = "PENSTOCK_NODE"
# file in the run folder, with the last number that a process without a supervisor took
COUNTER_FILE = "incarnations"
# Linux's own default maximum. Containers may have a hard limit of 2**30, and some programs loop
# over all descriptors.
MAX_DESCRIPTORS = 1 << 20
MACOS_MAX_DESCRIPTORS = 10_240  # maximum on macOS, regardless of the hard limit
MAX_FAILURE_LINES = 20  # lines per second
_LOCAL_TIME = "%m-%d %H:%M:%S"  # time in text logs; milliseconds follow
# number of new container objects after which the garbage collector examines them. A few new
# requests reach Python's default of 700: in a burst, a seventh of all CPU time went into
# collections that freed nothing.
YOUNG_OBJECTS = 10_000
_PR_SET_PDEATHSIG = 1
# bits of the numbers of one incarnation: 4 billion numbers, and 2 billion incarnations in an int64
_INCARNATION_BITS = 32


class Identity(NamedTuple):
    """One incarnation of a process, as its sockets are known to peers."""

    name: str
    pid: int = 0
    incarnation: int = 0

    def encode(self) -> bytes:
        return f"{self.name}/{self.pid}/{self.incarnation}".encode()

    @classmethod
    def decode(cls, routing_id: bytes) -> "Identity":
        """Return the identity in a routing id; a text of another form becomes the name."""
        name, *numbers = routing_id.decode(errors="replace").rsplit("/", 2)
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            return cls(name, *map(int, numbers))
        return cls(routing_id.decode(errors="replace"))


class Process:
    """One process: its name, configuration, ZeroMQ context and log.

    `identity` differs for each instance, so that a message for a dead instance can't reach its
    successor.
    """

    def __init__(self, kind: str) -> None:
        try:
            config = config_from_environment()
            folder = make_run_folder(config)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            sys.exit(f"{kind}: {error}")
        given = os.environ.get(PROCESS_VARIABLE) or os.environ.get("HONCHO_PROCESS_NAME")
        self.name = given or f"{kind}.{os.getpid()}"
        setproctitle(f"penstock::{self.name}")
        self.log = logging.getLogger(kind)
        raise_descriptor_limit()
        self.config: Config = config.of_process(self.name)
        make_run_folder(self.config)
        self.incarnation = take_incarnation(folder)
        self.identity = Identity(self.name, os.getpid(), self.incarnation).encode()
        _start_log(self.config, self.name)
        sys.excepthook = _end
        die_with_parent()
        self.context: Context = _make_context(folder, self.incarnation)

    def by_model(self) -> list[Self]:
        """Return a copy of this process for each model, if the process serves all models."""
        processes = [copy(self) for _ in self.config.by_model()]
        for process, config in zip(processes, self.config.by_model(), strict=True):
            process.config = config
            make_run_folder(config)
        return processes

    @property
    def replica(self) -> int:
        return replica_of(self.name, self.config)

    @property
    def endpoints(self) -> Endpoints:
        """The addresses of this pipeline, and of the replica that this process belongs to."""
        return endpoints(self.config, self.replica)

    @property
    def all_endpoints(self) -> list[Endpoints]:
        """The addresses of every replica, for a process that serves all replicas."""
        return [endpoints(self.config, replica) for replica in range(self.config.dp)]


def _make_context(folder: Path, incarnation: int) -> Context:
    """Return the context of a process: a `Cluster` if NODE_VARIABLE names this machine."""
    path = os.environ.get(NODE_VARIABLE)
    if path is None:
        return Context()
    from penstock.protocol.transport.discovery import Cluster, Node

    return Cluster(msgspec.json.decode(Path(path).read_bytes(), type=Node), folder, incarnation)


def take_incarnation(folder: Path) -> int:
    """Return this process's number, from its supervisor or from the run folder's counter.

    Attempts, epochs and identities contain the number. A clock that is set back would make a
    restarted process older than its predecessor, and peers would ignore the process.
    """
    if given := os.environ.get(INCARNATION_VARIABLE):
        return int(given)
    file = os.open(folder / COUNTER_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = int(os.pread(file, 20, 0) or 0) + 1
        os.pwrite(file, b"%020d" % number, 0)  # fixed width: the old number is replaced whole
        return number
    finally:
        os.close(file)


def first_number(incarnation: int) -> int:
    """Return an incarnation's first number, larger than all numbers of earlier incarnations."""
    return incarnation << _INCARNATION_BITS


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard limit, up to MAX_DESCRIPTORS.

    Each client takes a descriptor. The usual soft limit of 1,024 is for programs that use
    select(2). Children inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        for number in (wanted, MACOS_MAX_DESCRIPTORS):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
                return


def tune_collector() -> None:
    """Exclude modules, configuration and vocabulary from garbage collection; collect less often."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def text_line(message: str) -> str:
    """Return a log line of text, without its end."""
    now = datetime.now()
    return f"{now.strftime(_LOCAL_TIME)}.{now.microsecond // 1000:03} {message}"


def json_line(process: str, message: str, moment: float | None = None, **more: Any) -> str:
    """Return a log line of ASCII, without its end. `moment`: seconds since 1970; None: now."""
    seconds = time.time() if moment is None else moment
    stamp = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": stamp, **more, "process": process, "message": message})


class JsonFormatter(logging.Formatter):
    """Formatter of records as JSON maps, with the traceback and the request id in `extra`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        more = {"level": record.levelname.lower()}
        if request_id := getattr(record, "request_id", None):
            more["request_id"] = request_id
        return json_line(self._process, super().format(record), record.created, **more)


class FailureLog:
    """Log of failed requests at level `info`, with a limited rate."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._end = 0.0  # end of the second whose lines are counted, time.monotonic
        self._num_lines = self._num_left_out = 0

    def write(self, text: str, *values: object, request_id: str | None = None) -> None:
        """Log a failure, and the number of failures that were left out before it."""
        now = time.monotonic()
        if now >= self._end:
            self._end, self._num_lines = now + 1, 0
        if self._num_lines >= MAX_FAILURE_LINES:
            self._num_left_out += 1
            return
        self._num_lines += 1
        if self._num_left_out:
            self._log.info("%d more requests failed and have no line", self._num_left_out)
            self._num_left_out = 0
        self._log.info(text, *values, extra={"request_id": request_id})


def _start_log(config: Config, name: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(name))
    else:
        form = "%(asctime)s.%(msecs)03d %(levelname).1s %(message)s"
        handler.setFormatter(logging.Formatter(form, _LOCAL_TIME))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an exception. A ModelError is one sentence, and its exit code prevents a restart."""
    if not isinstance(error, ModelError):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("checkpoint").error("%s", error)
    logging.shutdown()
    os._exit(os.EX_CONFIG)


def die_with_parent() -> None:
    """Have the kernel (prctl(2)), or else a thread, kill this process when its parent exits."""
    parent = int(os.environ.get(SUPERVISOR_VARIABLE) or os.getppid())
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_die_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent exited before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _die_after(parent: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        ProcessExit(parent).wait()
    os.kill(os.getpid(), signal.SIGKILL)
