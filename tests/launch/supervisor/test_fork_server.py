"""A fork server of a line, and what it forks: real processes, of which some are killed."""

import asyncio
import itertools
import os
import signal

import pytest

from penstock.launch.supervisor import local as fork_server
from penstock.launch.supervisor.child_process import ChildProcess, adopting
from penstock.launch.supervisor.local import LocalProcess, forked_services
from penstock.launch.supervisor.output import Log
from penstock.protocol.config import Config
from tests.launch.supervisor.fork_site import SERVE, command, end, site, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
]
RESTARTED = "the fork server died with signal 9; restarted"


async def test_a_forked_process_is_a_child_of_its_own_session() -> None:
    async with site() as one:
        first, second = await one.fork("first"), await one.fork("second")
        assert first.pid != second.pid
        await end(first)
        await second.stop(grace=60)
        assert await second.end == "signal 15"


async def test_descriptors_are_inherited_under_their_own_numbers() -> None:
    async with site(SERVE + "os.write(int(os.environ['PIPE']), b'written')") as one:
        reader, writer = os.pipe()
        forked = await one.ask(PIPE=writer)
        os.close(writer)
        assert await forked.end == "exit code 0"
        assert os.read(reader, 99) == b"written"
        assert os.read(reader, 99) == b""  # neither the server nor the process has it
        os.close(reader)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("sys.exit(78)", "exit code 78"),
        ("os._exit(3)", "exit code 3"),
        ("raise SystemExit", "exit code 0"),
        ("os.abort()", "signal 6"),
    ],
)
async def test_exit_codes_of_processes_that_end_at_once(code: str, how: str) -> None:
    async with site(SERVE + code) as one:
        for _ in range(3):
            assert await (await one.fork()).end == how


@pytest.mark.parametrize(
    ("how", "number"), [(signal.SIGKILL, 4), (signal.SIGTERM, 1), (signal.SIGSEGV, 1)]
)
async def test_forked_processes_outlive_fork_servers_and_others_follow(
    how: signal.Signals, number: int
) -> None:
    """Also fork servers that are killed before they are ready."""
    async with site() as one:
        first = await one.fork("first")
        for _ in range(number):
            killed = one.server.pid
            os.kill(killed, how)
            while one.server.pid in (0, killed):
                await asyncio.sleep(0)
        assert one.said == [RESTARTED.replace("9", str(int(how)))] * number
        await end(await one.fork("second"))
        await end(first)


async def test_a_fork_server_that_is_always_killed_is_given_up() -> None:
    async with site("import os; os.kill(os.getpid(), 9)") as one:
        while await one.server.fork("demo", os.environ, one.log, {}) is None:
            if one.server.pid == 0 and len(one.said) == 5:
                break
            await asyncio.sleep(0)
        given_up = "the fork server died with signal 9; processes start without it"
        assert one.said == [RESTARTED] * 4 + [given_up]


async def test_a_fork_server_that_dies_during_a_request_forks_nothing() -> None:
    async with site() as one:
        first = await one.fork()
        os.kill(one.server.pid, signal.SIGSTOP)
        assert await one.stopped.get() == one.server.pid
        asked = asyncio.ensure_future(one.server.fork("demo", os.environ, one.log, {}))
        await asyncio.sleep(0)  # until the request is sent
        one.server.kill()
        assert await asked is None
        await end(first)


async def test_a_process_that_is_stopped_while_its_fork_server_dies_does_not_run() -> None:
    """Without the fork server, the supervisor starts a program, which must end at once."""
    async with site() as one:
        await end(await one.fork())
        own = dict(os.environ), itertools.count()
        process = LocalProcess("demo.1", "sleep 1", *own, forks=(one.server, "demo"))
        process.log = one.log
        os.kill(one.server.pid, signal.SIGSTOP)
        assert await one.stopped.get() == one.server.pid
        start = asyncio.ensure_future(process.spawn())
        await asyncio.sleep(0)  # until the request is sent
        process.wanted.clear()
        one.server.kill()
        await start
        assert await process.wait() == "signal 9"


async def test_the_end_of_a_process_that_is_not_a_child_is_noticed() -> None:
    """The exit code goes to the parent, but the end must still be reported."""
    async with site() as one:
        code = "import os; pid = os.fork(); pid and print(pid, flush=True); os.read(0, 1)"
        parent = started(code)
        assert parent.stdout
        process = ChildProcess.adopt(int(parent.stdout.readline()), one.log)
        os.kill(process.pid, signal.SIGKILL)
        assert (await process.end).startswith("an unknown exit code")
        parent.communicate("x")


async def test_without_a_fork_server_that_starts_there_is_none() -> None:
    """If imports fail, each process reports it, and no other fork server is started."""
    async with site("import sys; sys.exit('no module')") as one:
        for _ in range(2):
            assert await one.server.fork("demo", os.environ, one.log, {}) is None
        await one.tasks.wait()
        assert one.said == [
            "fork server: no module",
            "the fork server died with exit code 1; processes start without it",
        ]


async def test_a_process_that_dies_before_it_reports_leaves_no_zombie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "MAX_FORK_SECONDS", 0.5)
    async with site("import os; os.dup2 = lambda *_: os.kill(os.getpid(), 9)\n" + SERVE) as one:
        assert await one.server.fork("demo", os.environ, one.log, {}) is None
        assert one.said[0] == "fork server: no reply"


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_process_for_which_nobody_waits_any_more_is_killed(is_ready: bool) -> None:
    """Whoever is cancelled may close descriptors, though the server may send the request later.

    The site sees to it that no process is left.
    """
    async with site() as one:
        if is_ready:
            await end(await one.fork())
        log = Log(one.lines.put_nowait)
        asked = asyncio.ensure_future(one.ask("cancelled", log))
        await asyncio.sleep(0)
        asked.cancel()
        log.close()
        second = await one.ask()
        assert one.said == []
        await end(second)


async def test_the_fork_server_ends_with_its_supervisor() -> None:
    """Whatever it does: the kernel kills it."""
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
    async with site():
        with adopting(), started(code) as supervisor:
            assert supervisor.stdout
            server, forked = map(int, supervisor.stdout.readline().split())
            supervisor.wait()
        assert os.waitpid(server, 0)[1] == signal.SIGKILL
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


@pytest.mark.parametrize("http", [0, 1, 2])
def test_http_is_imported_only_where_it_is_served(http: int) -> None:
    services, worker = forked_services(Config(device="cpu", http=http))
    assert services == ["gateway", "tokenizer", "scheduler", "detokenizer"] + ["http"] * bool(http)
    assert worker == ["worker"]
