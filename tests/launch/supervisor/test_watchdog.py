"""Processes that the supervisor kills or leaves alone: with real processes and sockets."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from penstock.launch.supervisor.processes import Watched
from penstock.launch.supervisor.watchdog import SHOWN
from tests.launch.supervised import LONG


def test_a_step_without_end_is_killed(supervised: Callable[..., Any]) -> None:
    async def run() -> None:
        async with supervised(step_timeout=60.0) as one:
            slow, stuck = await one.child(), await one.child()
            one.pulse("worker.1", slow.pid, 59.0)
            one.pulse("worker.2", stuck.pid, 61.0)
            assert await stuck.wait() == -9
            assert slow.returncode is None
            assert one.said == ["worker.2 has been at one step for 61 s; killed"]

    asyncio.run(run())


def test_a_group_dies_together(supervised: Callable[..., Any]) -> None:
    async def run() -> None:
        async with supervised() as one:
            first, second, other, alone = [await one.child() for _ in range(4)]
            for name, child, group in (
                ("worker.1", first, "g"),
                ("worker.2", second, "g"),
                ("worker.3", other, "h"),
                ("gateway.1", alone, ""),
            ):
                one.pulse(name, child.pid)
                one.pulse(name, child.pid, group=group)
            one.pulse("worker.1", first.pid, LONG * 2, "g")
            assert await first.wait() == await second.wait() == -9
            assert other.returncode is None
            assert alone.returncode is None
            assert "worker.2 is in a group with worker.1, which is gone; killed" in one.said

    asyncio.run(run())


def test_what_a_process_counts_is_known_while_it_lives(supervised: Callable[..., Any]) -> None:
    async def run() -> None:
        async with supervised() as one:
            child = await one.child()
            assert one.pulses.newest("worker.1", child.pid).counters == {}
            for number in (1.0, 2.0):
                one.pulse("worker.1", child.pid, counters={"bad_frames": number})
            one.pulse("worker.1", child.pid, LONG * 2, counters={"bad_frames": 3.0})
            one.pulses._receive()
            while not one.said:
                await asyncio.sleep(0)
            assert one.pulses.newest("worker.1", child.pid).counters == {"bad_frames": 3.0}
            await child.wait()
            while one.pulses._guarded:
                await asyncio.sleep(0)
            assert one.pulses.newest("worker.1", child.pid).counters == {}

    asyncio.run(run())


def test_nobody_else_is_killed(supervised: Callable[..., Any]) -> None:
    """A pulse may come from anywhere; this test's own process is not its own child."""

    async def run() -> None:
        async with supervised() as one:
            child = await one.child()
            one.pulse("worker.1", os.getpid(), LONG * 2)
            one.pulse("worker.2", 2**22 + 1, LONG * 2)
            one.pulse("worker.3", child.pid, LONG * 2)
            assert await child.wait() == -9
            assert len(one.said) == 1

    asyncio.run(run())


def test_a_kill_that_comes_too_late_hits_nobody_else(supervised: Callable[..., Any]) -> None:
    """A process ends before its kill; the number of its descriptor becomes another's."""

    async def run() -> None:
        async with supervised() as one:
            dead, other = await one.child(), await one.child()
            one.pulses.spawned("worker.1", dead.pid)
            guarded = one.pulses._guarded["worker.1", dead.pid]
            one.pulses._kill(guarded, "hangs")
            one.pulses._ended(guarded)
            one.pulses.spawned("worker.2", other.pid)
            taken = one.pulses._guarded["worker.2", other.pid].process
            assert taken._pidfd == guarded.process._pidfd
            await asyncio.gather(*one.tasks._running)
            await guarded.process.kill()
            assert one.said == []
            other.send_signal(signal.SIGUSR1)
            assert await other.wait() == -signal.SIGUSR1

    asyncio.run(run())


def test_a_line_repeats_only_the_begin_of_a_name(supervised: Callable[..., Any]) -> None:
    """A frame may hold any name: it neither fills the log nor looks like lines of others."""

    async def run() -> None:
        async with supervised() as one:
            child = await one.child()
            one.pulse("worker.1\n\x1b" + "x" * 100_000, child.pid, LONG * 2)
            assert await child.wait() == -9
            name = "worker.1\\n\\x1b" + "x" * (SHOWN - 14)
            assert one.said == [f"{name} has been at one step for {LONG * 2:.0f} s; killed"]

    asyncio.run(run())


class Machines:
    """A host of processes on two machines, of which one can't be reached."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def watch(self, name: str, _pid: int, _on_end: Callable[[], None]) -> Watched:
        return Somewhere(self, name)


class Somewhere:
    """A process of theirs."""

    def __init__(self, machines: Machines, name: str) -> None:
        self._machines, self._name = machines, name

    async def works(self, _since: float) -> bool:
        return False

    async def kill(self) -> bool:
        if "far" in self._name:
            return False
        self._machines.killed.append(self._name)
        return True

    def forget(self) -> None:
        pass


def test_only_those_of_a_group_that_can_be_reached_are_killed(
    supervised: Callable[..., Any],
) -> None:
    """Processes that can't are neither killed nor polled again before their next sign of life."""

    async def run() -> None:
        machines = Machines()
        async with supervised(host=machines) as one:
            for name, group in (("far.1", "g"), ("far.2", "g"), ("near", "g"), ("other", "h")):
                one.pulse(name, 7, group=group)
            for _ in range(2):
                one.said.clear()
                one.pulse("far.1", 7, LONG * 2, group="g")
                while len(one.said) < 3:
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert machines.killed == ["near"]
                assert len(one.said) == 3
                machines.killed.clear()
                one.pulse("far.2", 7, group="g")
                one.pulse("near", 8, group="g")

    asyncio.run(run())
