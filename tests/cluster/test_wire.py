"""The network that the tests of several machines use, with real sockets between them."""

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster, Machine, ip, remove_leftovers

ROOT = Path(__file__).parents[2]
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(65536):
        connection.sendall(data)
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7)) as connection:
    answers = connection.makefile()
    for line in sys.stdin:
        connection.sendall(line.encode())
        print("sent", flush=True)
        print(answers.readline(), end="", flush=True)
"""
PYTHON = (sys.executable, "-P", "-c")
PIPE = subprocess.PIPE


class Asker:
    """A process on one machine that talks to the echo of another, over one connection."""

    def __init__(self, machine: Machine, address: str) -> None:
        process = machine.run(*PYTHON, ASK, address, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    def send(self, line: str) -> None:
        """Send a line: returns when it is in the network."""
        self._input.write(line + "\n")
        self._input.flush()
        assert self._output.readline() == "sent\n"

    def answer(self) -> str:
        """Wait for the line to come back."""
        return self._output.readline().strip()

    def ask(self, line: str) -> str:
        """Both."""
        self.send(line)
        return self.answer()

    def has_answer(self, seconds: float) -> bool:
        """Return whether the line comes back within `seconds`."""
        return bool(select.select([self._output], [], [], seconds)[0])


@pytest.fixture(scope="module")
def asker(cluster: Cluster) -> Asker:
    """From the first machine to the second."""
    first, second, _ = cluster.machines
    echo = second.run(*PYTHON, ECHO, second.address, stdout=PIPE)
    assert echo.stdout is not None
    assert echo.stdout.readline() == "up\n"
    return Asker(first, second.address)


@contextlib.contextmanager
def link(cluster: Cluster, index: int, **values: float) -> Iterator[None]:
    """Disturb a link for the block; mend it at the end."""
    cluster.wire.set_link(index, **values)
    try:
        yield
    finally:
        cluster.wire.set_link(index, is_cut=False, delay_ms=0, loss=0)


def test_cut_link_carries_nothing_until_it_is_mended(cluster: Cluster, asker: Asker) -> None:
    assert asker.ask("before") == "before"
    with link(cluster, 1, is_cut=True):
        before = cluster.wire.counts()[1]
        asker.send("meanwhile")
        after = cluster.wire.counts()[1]
        assert after["dropped"] > before["dropped"]
        assert after["received"] == before["received"]
    assert asker.answer() == "meanwhile"  # TCP has sent it again


def test_cut_takes_what_is_on_its_way(cluster: Cluster, asker: Asker) -> None:
    with link(cluster, 0, delay_ms=500):
        asker.send("late")
        with link(cluster, 1, is_cut=True):
            received = cluster.wire.counts()[1]["received"]
            assert not asker.has_answer(0.6)
            assert cluster.wire.counts()[1]["received"] == received
    assert asker.answer() == "late"


def test_links_delay_each_way(cluster: Cluster, asker: Asker) -> None:
    with link(cluster, 0, delay_ms=30), link(cluster, 1, delay_ms=20):
        start = time.monotonic()
        assert asker.ask("late") == "late"
        assert time.monotonic() - start >= 2 * (0.030 + 0.020)


def test_tcp_bears_loss(cluster: Cluster, asker: Asker) -> None:
    dropped = cluster.wire.counts()[1]["dropped"]
    long = "x" * 100_000
    with link(cluster, 1, loss=0.1):
        assert asker.ask(long) == long
        assert cluster.wire.counts()[1]["dropped"] > dropped


def test_capture_holds_what_passes(cluster: Cluster, asker: Asker) -> None:
    path = cluster.folder / "frames.pcap"
    asker.ask("unseen")
    cluster.wire.capture(path)
    asker.ask("seen")
    with link(cluster, 1, is_cut=True):
        asker.send("dropped")
        cluster.wire.capture(None)
    assert asker.answer() == "dropped"
    passed = b"".join(frames(path))
    assert passed.count(b"seen\n") == 2  # there and back
    assert b"unseen" not in passed
    assert b"dropped" not in passed


def frames(path: Path) -> Iterator[bytes]:
    """Return the frames of a pcap file."""
    data = path.read_bytes()
    magic, major, minor, *_, link_type = struct.unpack_from("=IHHiIII", data)
    assert (magic, major, minor, link_type) == (0xA1B2C3D4, 2, 4, 1)
    offset = 24
    while offset < len(data):
        *_, length, original = struct.unpack_from("=IIII", data, offset)
        assert length == original
        yield data[offset + 16 : offset + 16 + length]
        offset += 16 + length


def test_kill_ends_everything_on_one_machine_alone(cluster: Cluster) -> None:
    first, _, third = cluster.machines
    survivor = first.run("sleep", "60")
    # the child of a session of its own would survive its parent
    parent = third.run("sh", "-c", "setsid sleep 60 & echo $!; wait", stdout=PIPE)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    third.kill()
    assert parent.wait() == -signal.SIGKILL
    assert select.select([child], [], [], 0)[0]
    assert survivor.poll() is None
    survivor.kill()


@pytest.mark.usefixtures("cluster")
def test_leftovers_of_a_killed_run_vanish() -> None:
    """A cluster whose process was killed: namespaces, processes and folder."""
    script = (
        "from tests.cluster.machines import Cluster\n"
        "with Cluster() as cluster:\n"
        "    sleep = cluster.machines[0].run('sh', '-c', 'echo $$; exec sleep 60', stdout=-1)\n"
        "    print(cluster.folder, sleep.stdout.readline(), flush=True)\n"
        "    input()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([*PYTHON, script], env=environment, stdin=PIPE, stdout=PIPE, text=True)
    assert run.stdout is not None
    name, pid = run.stdout.readline().split()
    folder, sleep = Path(name), os.pidfd_open(int(pid))
    run.kill()
    run.wait()
    namespaces = (f"{folder.name}-{number}" for number in (1, 2, 3))
    assert folder.is_dir()
    assert all(name in ip("netns", "list") for name in namespaces)
    remove_leftovers()
    assert not folder.exists()
    assert folder.name not in ip("netns", "list")
    assert select.select([sleep], [], [], 0)[0]
