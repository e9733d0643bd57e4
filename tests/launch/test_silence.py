"""Silent processes and their end: with real processes and sockets."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.transport.context import leave
from tests.launch.supervised import LONG


async def test_a_silent_process_is_killed(supervised: Callable[..., Any]) -> None:
    async with supervised(hang_timeout=0.2) as one:
        child = await one.child("gateway.1")
        one.heartbeat("gateway.1", child.pid)
        assert await child.wait() == -9
        assert one.said == ["gateway.1 gave no sign of life for 0.2 s; killed"]


@pytest.mark.slow
async def test_a_process_that_hangs_before_its_first_heartbeat_is_killed(
    supervised: Callable[..., Any],
) -> None:
    async with supervised(step_timeout=0.2) as one:
        child, other = await one.child("gateway.1"), await one.child("scheduler.1")
        watched = one.watchdog.spawned(one.processes["scheduler.1"])
        one.heartbeat("scheduler.1", other.pid)
        while not watched.has_started:
            await asyncio.sleep(0)
        one.watchdog.spawned(one.processes["gateway.1"])
        assert await child.wait() == -9
        assert one.said == ["gateway.1 gave no sign of life for 0.2 s; killed"]
        assert other.returncode is None


async def test_a_process_that_is_stopped_is_killed(supervised: Callable[..., Any]) -> None:
    async with supervised(hang_timeout=0.2) as one:
        child = await one.child("gateway.1")
        child.send_signal(19)
        one.heartbeat("gateway.1", child.pid)
        assert await child.wait() == -9


SPIN = "while True: pass"


@pytest.mark.slow
async def test_a_silent_process_that_computes_is_left_until_it_stops(
    supervised: Callable[..., Any],
) -> None:
    """A call of C may hold the interpreter's lock: no heartbeat comes, but it uses a CPU."""
    async with supervised(hang_timeout=0.3) as one:
        busy, idle = await one.child("worker.1", SPIN), await one.child("worker.2")
        one.heartbeat("worker.1", busy.pid)
        one.heartbeat("worker.2", idle.pid)
        assert await idle.wait() == -9
        one.heartbeat("worker.3", (other := await one.child("worker.3")).pid)
        assert await other.wait() == -9  # twice the time
        assert busy.returncode is None
        busy.send_signal(signal.SIGSTOP)
        assert await busy.wait() == -9
        assert one.said[-1] == "worker.1 gave no sign of life for 0.3 s; killed"


async def test_a_silent_process_that_computes_has_the_time_of_a_step(
    supervised: Callable[..., Any],
) -> None:
    async with supervised(hang_timeout=0.2, step_timeout=0.8) as one:
        busy = await one.child("worker.1", SPIN)
        one.heartbeat("worker.1", busy.pid)
        assert await busy.wait() == -9
        assert one.said == ["worker.1 gave no sign of life for 0.8 s; killed"]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.5, 8.0])
async def test_nobody_is_late_after_all_stood_still(
    supervised: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The event loop's clock jumps, as when a machine was suspended: all have their time again."""
    loop = asyncio.get_running_loop()
    async with supervised(hang_timeout=1.6) as one:
        child = await one.child("gateway.1")
        one.heartbeat("gateway.1", child.pid, cpu_seconds=LONG)  # none since then
        while not one.watchdog._watched:
            await asyncio.sleep(0)
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + seconds)
        jumped_at = loop.time()
        assert await child.wait() == -9  # for it is silent after that, too
        assert loop.time() - jumped_at > 1.6


async def test_heartbeats_that_wait_count_before_anyone_is_judged(
    supervised: Callable[..., Any],
) -> None:
    async with supervised(hang_timeout=0.2) as one:
        child = await one.child("gateway.1")
        leave(one.watchdog._handlers)  # as if not called yet
        one.heartbeat("gateway.1", child.pid)
        assert await child.wait() == -9  # so its heartbeat was read
