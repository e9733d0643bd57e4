"""Machines that are network namespaces of this host, joined by `wire.py`, with or without Ray.

Each has an address of 10.77.0.0/24 of its own, its own loopback and ports; files and the CPU are
shared. The host itself has no address in that network. Several clusters at once do not disturb
one another. It needs root, /dev/net/tun and iproute2.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil

WIRE = Path(__file__).with_name("wire.py")
RAY = str(Path(sys.executable).with_name("ray"))
RAY_PORT = 6379
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
OURS = re.compile(r"penstock(\.|::)")
PREFIX = "pc"
"""of the names of clusters; short, because Ray's sockets have to fit in 107 characters"""
RAY_ENVIRONMENT = {
    # a node that does not answer 3 checks of 1 s is lost, 0.5 s lie between them
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # a quarter of the CPU time that a start takes
    "RAY_enable_metrics_collection": "0",
}


class Machine:
    """A network namespace: processes in it reach other machines by `eth0` alone."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self.ray: subprocess.Popen[str] | None = None
        """of its Ray node; ends when that is lost"""
        self._started: list[subprocess.Popen[str]] = []
        folder.mkdir()
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")

    def run(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command here, in a session of its own; `options` are Popen's."""
        in_namespace = ["ip", "netns", "exec", self.name, *command]
        process = subprocess.Popen(in_namespace, start_new_session=True, text=True, **options)
        self._started.append(process)
        return process

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put this thread on this machine for the block.

        Sockets that it makes there and threads that it starts stay there for good, the threads of
        a ZeroMQ context too.
        """
        outside_path, inside_path = Path("/proc/thread-self/ns/net"), NAMESPACES / self.name
        with outside_path.open() as outside, inside_path.open() as inside:
            _set_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_namespace(outside.fileno())

    def start_ray(self, head: "Machine | None", num_cpus: int) -> subprocess.Popen[str]:
        """Start a Ray node, of the cluster of `head`, or as head itself; see `wait_for_ray`."""
        if head:
            where = ["--address", f"{head.address}:{RAY_PORT}"]
        else:
            where = ["--head", "--port", str(RAY_PORT), "--include-dashboard", "false"]
        flags = [
            *("--node-ip-address", self.address, "--temp-dir", str(self.folder / "ray")),
            *("--num-cpus", str(num_cpus), "--disable-usage-stats"),
            *("--include-log-monitor", "false"),
            *("--object-store-memory", "80000000", "--block"),
        ]
        self.ray = self.run(
            *(RAY, "start", *where, *flags),
            env=os.environ | RAY_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return self.ray

    def commands(self) -> dict[int, str]:
        """Command lines of the processes here, by pid."""
        found = {}
        for pid in map(int, ip("netns", "pids", self.name).split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[pid] = " ".join(psutil.Process(pid).cmdline())
        return found

    def ours(self) -> dict[int, str]:
        """Command lines, or names, of the processes of Penstock, by pid."""
        return {pid: line for pid, line in self.commands().items() if OURS.search(line)}

    def remain(self, seconds: float) -> list[str]:
        """Command lines of the processes of Penstock that are still here so much later."""
        processes = [psutil.Process(pid) for pid in self.ours() if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(processes, timeout=seconds)
        return [" ".join(process.cmdline()) for process in alive]

    def kill(self) -> None:
        """SIGKILL for every process here; returns when they have ended.

        The kernel closes their sockets, which others see at once. A machine that has lost its
        power says nothing any more: cut its link first.
        """
        for process in self._started:
            process.kill()  # it may not have entered the namespace yet
        kill_all(self.name)
        for process in self._started:
            process.wait()
        self._started.clear()
        self.ray = None

    def remove(self) -> None:
        """Kills what runs here and takes the namespace away."""
        self.kill()
        ip("netns", "delete", self.name)


def wait_for_ray(node: subprocess.Popen[str]) -> None:
    """Wait until the node that `start_ray` has started is up."""
    said = []
    for line in node.stdout or ():
        said.append(line)
        if "Ray runtime started." in line:
            return
    raise RuntimeError(f"ray start ended with {node.wait()}:\n{''.join(said)}")


class Wire:
    """The network of some machines: `wire.py` as a process."""

    def __init__(self, machines: list[Machine], seed: int) -> None:
        names = [machine.name for machine in machines]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WIRE), str(seed), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ^C is for the tests; it ends with its input
        )
        self._read()
        for machine in machines:
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")

    def set_link(self, index: int, **values: float) -> None:
        """Cuts, delays, makes lossy, or mends: `is_cut`, `delay_ms`, `loss` (a share)."""
        self._ask(link=index, **values)

    def capture(self, path: Path | None) -> None:
        """Write every frame that arrives somewhere to a pcap file; None ends and closes it."""
        self._ask(capture=None if path is None else str(path))

    def counts(self) -> list[dict[str, int]]:
        """Return frames `sent`, `received` and `dropped`, and `received_bytes`, of each link."""
        counts: list[dict[str, int]] = self._ask(counts=True)["counts"]
        return counts

    def close(self) -> None:
        """End the process; its devices vanish with it."""
        self._process.communicate()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"wire.py has ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Cluster:
    """Machines 10.77.0.1, 10.77.0.2, … and their network, from enter to exit."""

    def __init__(self, num_machines: int = 3, seed: int = 0) -> None:
        self._num_machines = num_machines
        self._seed = seed
        self.machines: list[Machine] = []
        self.wire: Wire
        self.folder: Path
        """for the tests' files, too; removed at the end"""

    def __enter__(self) -> Self:
        remove_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-"))
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder)
            for number in range(1, self._num_machines + 1):
                name = f"{self.folder.name}-{number}"
                machine = Machine(name, f"10.77.0.{number}", self.folder / str(number))
                stack.callback(machine.remove)
                self.machines.append(machine)
            self.wire = Wire(self.machines, self._seed)
            stack.callback(self.wire.close)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def remove_leftovers() -> None:
    """Remove the remains of clusters whose process was killed."""
    ours = re.compile(rf"({PREFIX}-(\d+)-\w{{8}})(-\d+)?")
    temporary = Path(tempfile.gettempdir())
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time
        names = [line.split()[0] for line in ip("netns", "list").splitlines()]
        for name in names + [folder.name for folder in temporary.glob(f"{PREFIX}-*")]:
            match = ours.fullmatch(name)
            if match is None or psutil.pid_exists(int(match[2])):
                continue
            if match[3]:
                kill_all(name)
                ip("netns", "delete", name)
            else:
                shutil.rmtree(temporary / name)


def kill_all(namespace: str) -> None:
    """SIGKILL for every process in a namespace; waits until they have ended, if not reaped."""
    while pids := ip("netns", "pids", namespace).split():
        with contextlib.ExitStack() as stack:
            descriptors = []
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    descriptors.append(os.pidfd_open(pid))
                    stack.callback(os.close, descriptors[-1])
                    signal.pidfd_send_signal(descriptors[-1], signal.SIGKILL)
            for descriptor in descriptors:
                select.select([descriptor], [], [])  # readable once it has ended


def _set_namespace(descriptor: int) -> None:
    """Set the network namespace of this thread; `os.setns` exists since Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def ip(*arguments: str) -> str:
    """Return the output of `ip` of iproute2."""
    done = subprocess.run(["ip", *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout
