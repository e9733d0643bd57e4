"""Reports of processes that come and go."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.launch.supervisor.control_server import Report
from penstock.protocol.config import Config, make_run_folder
from penstock.protocol.messages.supervisor import SupervisorHeartbeat, SupervisorReport
from penstock.protocol.poison import PoisonList
from penstock.protocol.transport.context import Context


@pytest.fixture
def with_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[list[Any], Callable[[Report], None]], None]:
    """Hands a report about what runs to a function."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(running: list[Any], look: Callable[[Report], None]) -> None:
        async def main() -> None:
            make_run_folder(Config(name="p"))
            with Context() as context:
                by_name = {one.name: one for one in running}
                processes: Any = SimpleNamespace(context=context, by_name=by_name)
                watchdog: Any = SimpleNamespace(newest_heartbeat=_heartbeat)
                kinds = ["gateway", "worker"]
                report = Report(Config(name="p"), kinds, processes, watchdog, PoisonList())
                look(report)
                report.close()

        asyncio.run(main())

    return run


def _heartbeat(name: str) -> SupervisorHeartbeat:
    counters = {"name": float(len(name))}
    return SupervisorHeartbeat(name, 0, counters=counters, cpu_seconds=2.5, rss_bytes=1 << 20)


def running(name: str, pid: int, node: str) -> SimpleNamespace:
    started_at = time.monotonic() - 7.0
    return SimpleNamespace(name=name, pid=pid, node=node, started_at=started_at, num_starts=3)


def test_in_the_order_of_the_procfile(with_report: Callable[..., None]) -> None:
    def look(report: Report) -> None:
        gateway, worker = report.processes()
        assert (gateway.name, gateway.node) == ("gateway.1", "")
        assert (worker.name, worker.node) == ("worker.1", "gpu1")
        assert (worker.pid, int(worker.uptime), worker.restarts) == (17, 7, 2)
        assert (worker.counters, worker.cpu_seconds) == ({"name": 8}, 2.5)
        assert worker.rss_bytes == 1 << 20

    with_report(
        [
            running("worker.1", 17, "gpu1"),
            running("gateway.1", 18, ""),
            running("worker.2", 0, ""),
        ],
        look,
    )


def test_one_report_waits_for_a_gateway(with_report: Callable[..., None]) -> None:
    with_report([], _expect_full)


def _expect_full(report: Report) -> None:
    report.drain()
    assert not report._channel.send(SupervisorReport([]))
