"""Processes that the supervisor kills or leaves alone: with real processes and sockets."""

import asyncio
import os
import signal
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

from penstock.launch.supervisor.local import LocalProcess
from penstock.launch.supervisor.output import Log
from tests.launch.supervised import LONG, Known


async def test_a_step_without_end_is_killed(supervised: Callable[..., Any]) -> None:
    async with supervised(step_timeout=60.0) as one:
        slow, stuck = await one.child("worker.1"), await one.child("worker.2")
        one.heartbeat("worker.1", slow.pid, 59.0)
        one.heartbeat("worker.2", stuck.pid, 61.0)
        assert await stuck.wait() == -9
        assert slow.returncode is None
        assert one.said == ["worker.2 has been at one step for 61 s; killed"]


async def test_a_group_dies_together(supervised: Callable[..., Any]) -> None:
    async with supervised() as one:
        names = ("worker.1", "worker.2", "worker.3", "gateway.1")
        first, second, other, alone = [await one.child(name) for name in names]
        for name, child, group in (
            ("worker.1", first, "g"),
            ("worker.2", second, "g"),
            ("worker.3", other, "h"),
            ("gateway.1", alone, ""),
        ):
            one.heartbeat(name, child.pid)
            one.heartbeat(name, child.pid, group=group)
        one.heartbeat("worker.1", first.pid, LONG * 2, "g")
        assert await first.wait() == await second.wait() == -9
        assert other.returncode is None
        assert alone.returncode is None
        assert "worker.2 is in a group with worker.1, which has exited; killed" in one.said
        killed = {name: one.processes[name].killed_with_group for name in names}
        assert killed == dict.fromkeys(names, 0) | {"worker.2": second.pid}


async def test_a_group_that_lacks_ranks_is_killed(supervised: Callable[..., Any]) -> None:
    """A rank that died before a heartbeat named its group leaves the others in their rendezvous."""
    async with supervised() as one:
        one.watchdog._timer.cancel()  # what time it is, this test says
        groups = {"worker.1": "g", "worker.2": "h", "worker.3": "h", "worker.4": "late"}
        children = {name: await one.child(name) for name in (*groups, "worker.5")}
        for name, group in groups.items():
            one.heartbeat(name, children[name].pid, group=group, group_size=2)
        while len(one.watchdog._watched) < len(groups):
            await asyncio.sleep(0)
        one.watchdog._kill_lacking(1.0)
        one.heartbeat("worker.5", children["worker.5"].pid, group="late", group_size=2)
        while len(one.watchdog._watched) < len(children):
            await asyncio.sleep(0)
        one.watchdog._kill_lacking(LONG)
        assert one.said == []
        one.watchdog._kill_lacking(LONG + 2.0)
        assert await children["worker.1"].wait() == -9
        assert one.said == ["worker.1 is in a group that lacks ranks; killed"]
        assert one.processes["worker.1"].killed_with_group == children["worker.1"].pid
        assert [name for name, child in children.items() if child.returncode] == ["worker.1"]


async def test_a_group_that_is_stopped_on_request_is_left_alone(
    supervised: Callable[..., Any],
) -> None:
    async with supervised() as one:
        first, second = await one.child("worker.1"), await one.child("worker.2")
        for name, child in (("worker.1", first), ("worker.2", second)):
            one.heartbeat(name, child.pid, group="g")
        while len(one.watchdog._watched) < 2:
            await asyncio.sleep(0)
        one.processes["worker.2"].wanted.clear()
        first.terminate()
        while "worker.1" in one.watchdog._watched:
            await asyncio.sleep(0)
        assert not one.watchdog._watched["worker.2"].is_being_killed
        assert one.said == []


async def test_what_a_process_counts_is_known_while_it_lives(
    supervised: Callable[..., Any],
) -> None:
    async with supervised() as one:
        child = await one.child("worker.1")
        assert one.watchdog.newest_heartbeat("worker.1").counters == {}
        for number in (1.0, 2.0):
            one.heartbeat("worker.1", child.pid, counters={"bad_frames": number})
        one.heartbeat("worker.1", child.pid, LONG * 2, counters={"bad_frames": 3.0})
        one.watchdog._receive()
        while not one.said:
            await asyncio.sleep(0)
        assert one.watchdog.newest_heartbeat("worker.1").counters == {"bad_frames": 3.0}
        await child.wait()
        while one.watchdog._watched:
            await asyncio.sleep(0)
        assert one.watchdog.newest_heartbeat("worker.1").counters == {}


async def test_nobody_else_is_killed(supervised: Callable[..., Any]) -> None:
    """A heartbeat may come from anywhere, and its frame may hold any name and pid."""
    async with supervised() as one:
        child, other = await one.child("worker.3"), await one.child("worker.4")
        one.heartbeat("worker.1", os.getpid(), LONG * 2)
        one.heartbeat("worker.2\n" + "x" * 100_000, child.pid, LONG * 2)
        one.heartbeat("worker.4", child.pid, LONG * 2)
        one.heartbeat("worker.4", 2**22 + 1, LONG * 2)
        one.heartbeat("worker.3", child.pid, LONG * 2)
        assert await child.wait() == -9
        assert len(one.said) == 1
        assert other.returncode is None


async def test_a_wrapped_process_is_its_wrappers() -> None:
    """A command of the procfile may be a script that starts the process."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    command = "sh -c 'sh -c \"echo \\$\\$; sleep 600; true\"; true'"  # its stdin is empty
    process = LocalProcess("worker.1", command, {}, count(1))
    process.log = Log(lines.put_nowait)
    assert not process.owns(os.getpid())
    await process.spawn()
    wrapped = int(await lines.get())
    assert wrapped != process.pid
    assert process.owns(wrapped)
    assert process.owns(process.pid)
    assert not process.owns(os.getpid())
    assert not process.owns(2**22 + 1)
    await process.kill()
    assert await process.wait() == "signal 9"
    await process.release()


async def test_a_kill_that_comes_too_late_hits_nobody_else(supervised: Callable[..., Any]) -> None:
    """A process ends before its kill, and its name is another's."""
    async with supervised() as one:
        dead = await one.child("worker.1")
        process = one.processes["worker.1"]
        watched = one.watchdog.spawned(process)
        one.watchdog._kill(watched, "hangs")
        one.watchdog.exited(process)
        process.child = await one.child("worker.1")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert one.said == []
        for child in (dead, process.child):
            child.send_signal(signal.SIGUSR1)
            assert await child.wait() == -signal.SIGUSR1


class Somewhere(Known):
    """A process on one of two machines, of which one can't be reached."""

    def __init__(self, name: str, killed: list[str]) -> None:
        super().__init__(name, SimpleNamespace(pid=7))
        self._killed = killed

    async def kill(self) -> bool:
        if "far" in self.name:
            return False
        self._killed.append(self.name)
        return True


async def test_only_those_of_a_group_that_can_be_reached_are_killed(
    supervised: Callable[..., Any],
) -> None:
    """Processes that can't are neither killed nor polled again before their next sign of life."""
    killed: list[str] = []
    async with supervised() as one:
        for name in ("far.1", "far.2", "near", "other"):
            one.processes[name] = Somewhere(name, killed)
        for name, group in (("far.1", "g"), ("far.2", "g"), ("near", "g"), ("other", "h")):
            one.heartbeat(name, 7, group=group)
        for _ in range(2):
            one.said.clear()
            one.heartbeat("far.1", 7, LONG * 2, group="g")
            while len(one.said) < 3:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert killed == ["near"]
            assert len(one.said) == 3
            killed.clear()
            one.watchdog.exited(one.processes["near"])
            one.heartbeat("far.2", 7, group="g")
            one.heartbeat("near", 7, group="g")
