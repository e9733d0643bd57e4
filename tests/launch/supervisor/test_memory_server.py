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


@pytest.mark.parametrize(("code", "is_used"), [(0, True), (1, True), (70, False), (139, False)])
def test_memory_is_used_after_orderly_exits(code: int, is_used: bool) -> None:
    """139: a shell whose command had a segmentation fault."""

    async def test() -> None:
        async with site() as one:
            first = one.start(MAKE.replace("signal.pause()", f"sys.exit({code})"))
            await first.line()
            first.end.set_result(describe_exit(await asyncio.to_thread(first.popen.wait)))
            successor = one.start(TAKE)
            assert (await successor.line() != "None") == is_used

    run(test())


def test_memory_that_is_dropped_while_another_process_waits_for_it() -> None:
    async def test() -> None:
        async with site() as one:
            first = one.start(MAKE.replace("signal.pause()", DROP_AT_SIGNAL))
            await first.line()
            successor = one.start("say('starts')" + TAKE)
            assert await successor.line() == "starts"
            line = asyncio.ensure_future(successor.line())
            while not one.tasks._running:  # until the server has the message
                await asyncio.sleep(0)
            first.popen.send_signal(signal.SIGUSR1)
            assert await first.line() == "dropped"
            first.end.set_result(describe_exit(await asyncio.to_thread(first.popen.wait)))
            assert await line == "None"

    run(test())


def test_only_one_of_two_processes_that_wait_has_the_memory() -> None:
    async def test() -> None:
        async with site() as one:
            first = one.start(MAKE)
            await first.line()
            waiting = [one.start("say('starts')" + TAKE) for _ in range(2)]
            assert [await child.line() for child in waiting] == ["starts", "starts"]
            lines = {asyncio.ensure_future(child.line()): child for child in waiting}
            while len(one.tasks._running) < 2:
                await asyncio.sleep(0)
            await first.kill()
            done, [other] = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
            assert done.pop().result() == str((b"one", b"filled"))
            assert len(one.tasks._running) == 1  # the other one waits for this one's exit
            await next(child for line, child in lines.items() if line is not other).kill()
            assert await other == str((b"one", b"filled"))

    run(test())


def test_descriptors_that_no_message_may_have_are_closed() -> None:
    async def test() -> None:
        code = "for _ in range(9): client._request(TakeMemory('x'), [make(b'')])\nsay('sent')"
        async with site() as one:
            before = open_descriptors()
            child = one.start(
                "from penstock.protocol.messages.supervisor import TakeMemory\n" + code
            )
            assert await child.line() == "sent"
            pipe = {number for number, _ in open_descriptors() - before}
            assert len(pipe) <= 2  # the socket and the standard output of the child

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


def test_memory_is_opened_by_its_manifest() -> None:
    """With another manifest the memory is zeros."""

    async def test() -> None:
        async with site() as one:
            for manifest, found in ((b"a", bytes(2)), (b"a", b"hi"), (b"b", bytes(2))):
                code = f"""
memory = client.open('x', 4096, {manifest!r})
say(memory[:2]); memory[:2] = b'hi'; say('written'); signal.pause()
"""
                child = one.start(code)
                assert await child.line() == str(found)
                assert await child.line() == "written"
                await child.kill()

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
