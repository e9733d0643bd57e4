"""A fork server of a line, and what it forks: real processes, of which some are killed."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from penstock.launch.supervisor.child_events import ChildEvents, adopting
from penstock.launch.supervisor.child_process import ChildProcess
from penstock.launch.supervisor.fork_server import ForkServer
from penstock.launch.supervisor.logs import Log
from penstock.launch.supervisor.tasks import Tasks

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
SERVE = """
import os, signal, sys
from penstock.protocol.transport.forks import serve_forks
service = serve_forks()
assert service == "demo", service
print(os.environ["WHO"], os.getppid(), os.getsid(0) == os.getpid(), flush=True)
"""


def command(code: str) -> str:
    return shlex.join([sys.executable, "-P", "-c", code])


def started(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class Site:
    """A fork server, and the lines of what it forks."""

    def __init__(self, code: str) -> None:
        self.errors: list[BaseException] = []
        self.said: list[str] = []
        self.stopped: asyncio.Queue[int] = asyncio.Queue()
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.log = Log(self.lines.put_nowait)
        self.events = ChildEvents(0.1, self.stopped.put_nowait)
        tasks = Tasks(self.errors.append)
        self.server = ForkServer(command(code), dict(os.environ), tasks, self.said.append)
        self.tasks = tasks

    async def fork(self, who: str = "x") -> ChildProcess:
        forked = await self.server.fork("demo", os.environ | {"WHO": who}, self.log, {})
        assert forked
        assert await self.lines.get() == f"{who} {os.getpid()} True"
        return forked


@asynccontextmanager
async def site(code: str = SERVE + "signal.pause()") -> AsyncIterator[Site]:
    """Yield a site that leaves neither processes nor descriptors."""
    children = psutil.Process().children(recursive=True)
    before = set(Path("/proc/self/fd").iterdir())
    one = Site(code)
    try:
        yield one
    finally:
        await one.server.close()
        await one.tasks.wait()
        one.log.close()
        one.events.close()
    assert one.errors == []
    assert psutil.Process().children(recursive=True) == children  # zombies count
    assert len(set(Path("/proc/self/fd").iterdir())) <= len(before)


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_a_forked_process_is_a_child_of_its_own_session() -> None:
    async def test() -> None:
        async with site() as one:
            first, second = await one.fork("first"), await one.fork("second")
            assert first.pid != second.pid
            first.kill()
            assert await first.end == "signal 9"
            await second.stop(grace=60)
            assert await second.end == "signal 15"

    run(test())


def test_descriptors_are_inherited_under_their_own_numbers() -> None:
    async def test() -> None:
        code = SERVE + "os.write(int(os.environ['PIPE']), b'written')"
        async with site(code) as one:
            reader, writer = os.pipe()
            forked = await one.server.fork(
                "demo", os.environ | {"WHO": "x"}, one.log, {"PIPE": writer}
            )
            assert forked
            os.close(writer)
            assert await forked.end == "exit code 0"
            assert os.read(reader, 99) == b"written"
            assert os.read(reader, 99) == b""  # neither the server nor the process has it
            os.close(reader)

    run(test())


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("sys.exit(78)", "exit code 78"),
        ("os._exit(3)", "exit code 3"),
        ("raise SystemExit", "exit code 0"),
        ("os.abort()", "signal 6"),
    ],
)
def test_exit_codes_of_processes_that_end_at_once(code: str, end: str) -> None:
    async def test() -> None:
        async with site(SERVE + code) as one:
            for _ in range(3):
                forked = await one.fork()
                assert await forked.end == end

    run(test())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_forked_processes_outlive_the_fork_server_and_another_one_follows(
    how: signal.Signals,
) -> None:
    async def test() -> None:
        async with site() as one:
            first = await one.fork("first")
            server = one.server.pid
            os.kill(server, how)
            while one.server.pid in (0, server):
                await asyncio.sleep(0)
            assert one.said == [f"the fork server died with signal {int(how)}; restarted"]
            second = await one.fork("second")
            for process in (first, second):
                assert not process.end.done()
                process.kill()
                assert await process.end == "signal 9"

    run(test())


def test_a_fork_server_that_is_killed_before_it_is_ready_is_restarted() -> None:
    async def test() -> None:
        async with site() as one:
            first = await one.fork("first")
            for _ in range(4):
                killed = one.server.pid
                os.kill(killed, signal.SIGKILL)
                while one.server.pid in (0, killed):
                    await asyncio.sleep(0)
            second = await one.fork("second")
            assert one.said == ["the fork server died with signal 9; restarted"] * 4
            for process in (first, second):
                process.kill()
                await process.end

    run(test())


def test_a_fork_server_that_is_always_killed_is_given_up() -> None:
    async def test() -> None:
        async with site("import os; os.kill(os.getpid(), 9)") as one:
            while await one.server.fork("demo", os.environ, one.log, {}) is None:
                if one.server.pid == 0 and len(one.said) == 5:
                    break
                await asyncio.sleep(0)
            assert one.said[-1] == "the fork server died with signal 9; processes start without it"
            assert one.said[:4] == ["the fork server died with signal 9; restarted"] * 4

    run(test())


def test_a_fork_server_that_dies_during_a_request_forks_nothing() -> None:
    async def test() -> None:
        async with site() as one:
            first = await one.fork()
            os.kill(one.server.pid, signal.SIGSTOP)
            assert await one.stopped.get() == one.server.pid
            asked = asyncio.ensure_future(
                one.server.fork("demo", os.environ | {"WHO": "second"}, one.log, {})
            )
            await asyncio.sleep(0)  # until the request is sent
            one.server.kill()
            assert await asked is None
            first.kill()
            await first.end

    run(test())


def test_the_end_of_a_process_that_is_not_a_child_is_noticed() -> None:
    """The exit code goes to the parent, but the end must still be reported."""

    async def test() -> None:
        async with site() as one:
            code = "import os; pid = os.fork(); pid and print(pid, flush=True); os.read(0, 1)"
            parent = started(code)
            assert parent.stdout
            process = ChildProcess.adopt(int(parent.stdout.readline()), one.log)
            os.kill(process.pid, signal.SIGKILL)
            assert (await process.end).startswith("an unknown exit code")
            parent.communicate("x")

    run(test())


def test_without_a_fork_server_that_starts_there_is_none() -> None:
    """If imports fail, each process reports it, and no other fork server is started."""

    async def test() -> None:
        async with site("import sys; sys.exit('no module')") as one:
            for _ in range(2):
                assert await one.server.fork("demo", os.environ, one.log, {}) is None
            await one.tasks.wait()
            assert one.said == [
                "fork server: no module",
                "the fork server died with exit code 1; processes start without it",
            ]

    run(test())


def test_a_process_for_which_nobody_waits_any_more_is_killed() -> None:
    async def test() -> None:
        async with site() as one:
            asked = asyncio.ensure_future(
                one.server.fork("demo", os.environ | {"WHO": "first"}, one.log, {})
            )
            await asyncio.sleep(0)
            asked.cancel()
            second = await asyncio.shield(
                one.server.fork("demo", os.environ | {"WHO": "x"}, one.log, {})
            )
            assert second
            own = psutil.Process().children()
            assert {child.pid for child in own if child.status() != psutil.STATUS_ZOMBIE} >= {
                second.pid,
                one.server.pid,
            }
            second.kill()
            await second.end

    run(test())


def test_a_caller_that_is_cancelled_may_close_its_descriptors() -> None:
    """The fork server is not ready yet, and may send the request later."""

    async def test() -> None:
        async with site() as one:
            log = Log(one.lines.put_nowait)
            asked = asyncio.ensure_future(
                one.server.fork("demo", os.environ | {"WHO": "first"}, log, {})
            )
            await asyncio.sleep(0)
            asked.cancel()
            log.close()
            second = await one.server.fork("demo", os.environ | {"WHO": "x"}, one.log, {})
            assert second
            assert one.said == []
            second.kill()
            await second.end

    run(test())


def test_the_fork_server_ends_with_its_supervisor() -> None:
    """Whatever it does: the kernel kills it."""

    async def test() -> None:
        async with site() as one:
            code = f"""
import asyncio, os, sys
from penstock.launch.supervisor.fork_server import ForkServer
from penstock.launch.supervisor.tasks import Tasks
from penstock.launch.supervisor.logs import Log
async def run():
    server = ForkServer({command(SERVE + "signal.pause()")!r}, os.environ, Tasks(print), print)
    forked = await server.fork("demo", {{**os.environ, "WHO": "x"}}, Log(lambda _: None), {{}})
    os.kill(server.pid, 19)
    print(server.pid, forked.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(run())
"""
            with adopting(), started(code) as supervisor:
                assert supervisor.stdout
                server, forked = map(int, supervisor.stdout.readline().split())
                supervisor.wait()
            assert os.waitpid(server, 0)[1] == signal.SIGKILL
            os.kill(forked, signal.SIGKILL)
            os.waitpid(forked, 0)
            del one

    run(test())
