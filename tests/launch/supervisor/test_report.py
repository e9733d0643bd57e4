"""Reports of processes that come and go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.launch.supervisor.control_server import Report
from penstock.protocol.config import Config, make_run_folder
from penstock.protocol.messages.supervisor import SupervisorHeartbeat, SupervisorReport
from penstock.protocol.poison import PoisonList
from penstock.protocol.transport.context import Context


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@contextmanager
def report_of(*running: SimpleNamespace) -> Iterator[Report]:
    config = Config(name="p")
    make_run_folder(config)
    with Context() as context:
        by_name = {one.name: one for one in running}
        processes: Any = SimpleNamespace(context=context, by_name=by_name)
        watchdog: Any = SimpleNamespace(newest_heartbeat=_heartbeat)
        report = Report(config, ["gateway", "worker"], processes, watchdog, PoisonList())
        yield report
        report.close()


def _heartbeat(name: str) -> SupervisorHeartbeat:
    counters = {"name": float(len(name))}
    return SupervisorHeartbeat(name, 0, counters=counters, cpu_seconds=2.5, rss_bytes=1 << 20)


def running(name: str, pid: int, node: str = "") -> SimpleNamespace:
    started_at = time.monotonic() - 7.0
    return SimpleNamespace(name=name, pid=pid, node=node, started_at=started_at, num_starts=3)


async def test_in_the_order_of_the_procfile() -> None:
    every = running("worker.1", 17, "gpu1"), running("gateway.1", 18), running("worker.2", 0)
    with report_of(*every) as report:
        gateway, worker = report.processes()
        assert (gateway.name, gateway.node) == ("gateway.1", "")
        assert (worker.name, worker.node) == ("worker.1", "gpu1")
        assert (worker.pid, int(worker.uptime), worker.restarts) == (17, 7, 2)
        assert (worker.counters, worker.cpu_seconds) == ({"name": 8}, 2.5)
        assert worker.rss_bytes == 1 << 20


async def test_one_report_waits_for_a_gateway() -> None:
    with report_of() as report:
        report.drain()
        assert not report._channel.send(SupervisorReport([]))
