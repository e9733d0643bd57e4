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
from penstock.launch.supervisor.local import MemoryServer
from penstock.launch.supervisor.processes import Tasks
from penstock.protocol.transport.socket_pairs import MEMORY_VARIABLE, socket_pair

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
DESCRIPTORS = Path("/proc/self/fd")
START = """
import mmap, os, signal, sys
from penstock.protocol.transport.socket_pairs import MemoryClient
client = MemoryClient.from_environment()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
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
FILLED = str((b"one", b"filled"))
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
DROP_AT_SIGNAL = "signal.sigwait([signal.SIGUSR1]); client.drop('kv'); say('dropped'); sys.exit(1)"


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

    async def kill(self) -> None:
        self.popen.kill()
        await self.ended()

    async def ended(self) -> None:
        self.end.set_result(describe_exit(await asyncio.to_thread(self.popen.wait)))


class Site:
    """A server and its processes."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.said: list[str] = []
        self.tasks = Tasks(self.errors.append)
        self.server = MemoryServer(self.tasks, self.said.append)
        self.children: list[Child] = []

    async def start(self, code: str, *expected: object) -> Child:
        """Return a child that has printed what is expected."""
        self.children.append(Child(self.server, code))
        for text in expected:
            assert await self.children[-1].line() == str(text)
        return self.children[-1]

    async def wait_for_memory(self, number: int) -> "dict[asyncio.Future[str], Child]":
        """Return children for which the server waits, by what each of them will print."""
        children = [await self.start("say('starts')" + TAKE, "starts") for _ in range(number)]
        lines = {asyncio.ensure_future(child.line()): child for child in children}
        while len(self.tasks._running) < number:
            await asyncio.sleep(0)
        return lines


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


async def test_it_is_passed_on_when_its_user_has_exited() -> None:
    async with site() as one:
        first = await one.start(MAKE, "kept")
        [line] = await one.wait_for_memory(1)
        first.popen.kill()
        first.popen.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # until the server has begun to wait
        assert one.server._regions
        first.end.set_result("signal 9")
        assert await line == FILLED


@pytest.mark.parametrize(
    ("end", "is_used"),
    [
        ("sys.exit(0)", True),
        ("sys.exit(1)", True),
        ("sys.exit(70)", False),
        ("sys.exit(139)", False),  # a shell whose command had a segmentation fault
        *((f"signal.raise_signal({number})", False) for number in CRASHES),
    ],
)
async def test_memory_is_used_after_orderly_exits_alone(end: str, is_used: bool) -> None:
    async with site() as one:
        await (await one.start(MAKE.replace("signal.pause()", end), "kept")).ended()
        await one.start(TAKE, FILLED if is_used else None)
        assert len(one.said) == (not is_used)
        for line in one.said:
            assert line.startswith("memory kv is not used again: its process ended with ")


async def test_memory_that_is_dropped_while_another_process_waits_for_it() -> None:
    async with site() as one:
        first = await one.start(MAKE.replace("signal.pause()", DROP_AT_SIGNAL), "kept")
        [line] = await one.wait_for_memory(1)
        first.popen.send_signal(signal.SIGUSR1)
        assert await first.line() == "dropped"
        await first.ended()
        assert await line == "None"


async def test_only_one_of_two_processes_that_wait_has_the_memory() -> None:
    async with site() as one:
        first = await one.start(MAKE, "kept")
        lines = await one.wait_for_memory(2)
        await first.kill()
        done, [other] = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
        assert done.pop().result() == FILLED
        assert len(one.tasks._running) == 1  # the other one waits for this one's exit
        await next(child for line, child in lines.items() if line is not other).kill()
        assert await other == FILLED


async def test_descriptors_that_no_message_may_have_are_closed() -> None:
    code = "for _ in range(9): client._request(TakeMemory('x'), [make(b'')])\nsay('sent')"
    async with site() as one:
        before = open_descriptors()
        await one.start("from penstock.protocol.messages.supervisor import *\n" + code, "sent")
        pipe = {number for number, _ in open_descriptors() - before}
        assert len(pipe) <= 2  # the socket and the standard output of the child


async def test_what_is_not_kept_ends_with_its_process() -> None:
    """A process that is killed while it loads: nobody takes a part for the whole."""
    async with site() as one:
        await (await one.start("make(b'half'); say('half'); signal.pause()", "half")).kill()
        await one.start(TAKE, None)


async def test_undecodable_messages_end_the_connection() -> None:
    async with site() as one:
        await one.start("client._socket.send(b'x'); say(client._socket.recv(9))", b"")


async def test_memory_is_opened_by_its_manifest() -> None:
    """With another manifest the memory is zeros."""
    write = "say(memory[:2]); memory[:2] = b'hi'; say('written'); signal.pause()"
    async with site() as one:
        for manifest, found in ((b"a", bytes(2)), (b"a", b"hi"), (b"b", bytes(2))):
            code = f"memory = client.open('x', 4096, {manifest!r})\n{write}"
            await (await one.start(code, found, "written")).kill()


async def test_mapped_memory_is_shared() -> None:
    """The successor sees what its predecessor wrote after it had passed the memory on."""
    async with site() as one:
        code = """
descriptor = make(bytes(4096))
client.keep('kv', b'one', descriptor)
mmap.mmap(descriptor, 4096)[:5] = b'later'
say('written'); signal.pause()
"""
        await (await one.start(code, "written")).kill()
        for _ in range(2):  # the next one has it again
            code = "say(mmap.mmap(client.take('kv').descriptor, 4096)[:5]); signal.pause()"
            await (await one.start(code, b"later")).kill()
