"""A fork server of a line, and what it forks: real processes, of which some are killed."""

import asyncio
import os
import signal

import psutil
import pytest

from penstock.launch.supervisor import local as fork_server
from penstock.launch.supervisor.child_process import ChildProcess, adopting
from penstock.launch.supervisor.output import Log
from tests.launch.supervisor.fork_site import SERVE, command, run, site, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
]


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


def test_a_process_that_dies_before_it_reports_leaves_no_zombie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "MAX_FORK_SECONDS", 0.5)

    async def test() -> None:
        async with site("import os; os.dup2 = lambda *_: os.kill(os.getpid(), 9)\n" + SERVE) as one:
            assert await one.server.fork("demo", os.environ, one.log, {}) is None
            assert one.said[0] == "fork server: no reply"

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
from penstock.launch.supervisor.local import ForkServer
from penstock.launch.supervisor.processes import Tasks
from penstock.launch.supervisor.output import Log
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
