"""Memory that outlives real processes, of which some are killed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.launch.supervisor.child_process import describe_exit
from penstock.launch.supervisor.memory_server import MemoryServer
from penstock.launch.supervisor.tasks import Tasks
from penstock.protocol.transport.kept_memory import MEMORY_VARIABLE, socket_pair

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
DESCRIPTORS = Path("/proc/self/fd")
START = """
import mmap, os, signal, sys
from penstock.protocol.transport.kept_memory import MemoryClient
client = MemoryClient.from_environment()
def say(text):
    print(text, flush=True)
def make(text):
    descriptor = os.memfd_create("test")
    os.write(descriptor, text)
    return descriptor
"""
MAKE = "client.keep('kv', b'one', make(b'filled')); say('kept'); signal.pause()"
TAKE = """
taken = client.take('kv')
say(taken and (taken.manifest, os.pread(taken.descriptor, 99, 0)))
signal.pause()
"""


class Child:
    """A process with a client of the server."""

    def __init__(self, server: MemoryServer, code: str) -> None:
        pair = socket_pair()
        assert pair
        ours, theirs = pair
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-c", START + code],
                env=os.environ | {MEMORY_VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                text=True,
            )
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server.serve(ours, self.end)

    async def line(self) -> str:
        assert self.popen.stdout
        return (await asyncio.to_thread(self.popen.stdout.readline)).rstrip()

    async def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.popen.send_signal(how)
        self.end.set_result(describe_exit(await asyncio.to_thread(self.popen.wait)))


class Site:
    """A server and its processes."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.said: list[str] = []
        self.tasks = Tasks(self.errors.append)
        self.server = MemoryServer(self.tasks, self.said.append)
        self.children: list[Child] = []

    def start(self, code: str) -> Child:
        self.children.append(Child(self.server, code))
        return self.children[-1]


def open_descriptors() -> set[tuple[str, str]]:
    """Return this process's open descriptors, and what they refer to."""
    paths = [path for path in [*DESCRIPTORS.iterdir()] if path.is_symlink()]  # not iterdir's own
    return {(path.name, str(path.readlink())) for path in paths}


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Yield a site that is left without descriptors and processes."""
    before = open_descriptors()
    one = Site()
    try:
        yield one
    finally:
        for child in one.children:
            child.popen.kill()
            child.popen.wait()
            if child.popen.stdout:
                child.popen.stdout.close()
        one.server.close()
    assert one.errors == []
    assert open_descriptors() <= before  # fewer: what an earlier test left was collected


def run(test: object) -> None:
    asyncio.run(asyncio.wait_for(test, 60))  # type: ignore[arg-type]


def test_memory_outlives_its_process() -> None:
    async def test() -> None:
        async with site() as one:
            first = one.start(MAKE)
            assert await first.line() == "kept"
            await first.kill()
            for _ in range(2):  # the next one has it again
                successor = one.start(TAKE)
                assert await successor.line() == str((b"one", b"filled"))
                await successor.kill()

    run(test())


def test_it_is_passed_on_when_its_user_has_exited() -> None:
    async def test() -> None:
        async with site() as one:
            first = one.start(MAKE)
            await first.line()
            successor = one.start("say('starts')" + TAKE)
            assert await successor.line() == "starts"
            line = asyncio.ensure_future(successor.line())
            first.popen.kill()
            first.popen.wait()
            while not one.tasks._running:  # until the server has the message
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # and has begun to wait
            await asyncio.sleep(0)
            assert one.server._regions
            first.end.set_result("signal 9")
            assert await line == str((b"one", b"filled"))

    run(test())


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_memory_of_a_process_that_crashed_is_not_used(how: signal.Signals) -> None:
    async def test() -> None:
        async with site() as one:
            first = one.start(MAKE)
            await first.line()
            await first.kill(how)
            successor = one.start(TAKE)
            assert await successor.line() == "None"
            [line] = one.said
            assert line == f"memory kv is not used again: its process ended with signal {int(how)}"

    run(test())


def test_a_process_drops_all_that_it_uses() -> None:
    async def test() -> None:
        async with site() as one:
            first = one.start(MAKE)
            await first.line()
            await first.kill()
            code = "client.take('kv'); client.keep('b', b'two', make(b'x')); client.drop(); say(1)"
            second = one.start(code)
            assert await second.line() == "1"
            await second.kill()
            third = one.start("say(client.take('kv') or client.take('b'))")
            assert await third.line() == "None"

    run(test())


def test_what_is_not_kept_ends_with_its_process() -> None:
    """A process that is killed while it loads: nobody takes a part for the whole."""

    async def test() -> None:
        async with site() as one:
            first = one.start("make(b'half'); say('half'); signal.pause()")
            await first.line()
            await first.kill()
            successor = one.start(TAKE)
            assert await successor.line() == "None"

    run(test())


def test_undecodable_messages_end_the_connection() -> None:
    async def test() -> None:
        async with site() as one:
            code = "client._socket.send(b'x'); say(client._socket.recv(9))"
            assert await one.start(code).line() == "b''"

    run(test())


def test_mapped_memory_is_shared() -> None:
    """The successor sees what its predecessor wrote after it had passed the memory on."""

    async def test() -> None:
        async with site() as one:
            code = """
descriptor = make(bytes(4096))
client.keep('kv', b'one', descriptor)
mmap.mmap(descriptor, 4096)[:5] = b'later'
say('written'); signal.pause()
"""
            first = one.start(code)
            await first.line()
            await first.kill()
            code = "say(mmap.mmap(client.take('kv').descriptor, 4096)[:5])"
            assert await one.start(code).line() == "b'later'"

    run(test())
