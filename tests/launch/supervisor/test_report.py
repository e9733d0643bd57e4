"""Reports of processes that come and go."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.launch.supervisor.child import ExplainedDeaths
from penstock.launch.supervisor.processes import Running
from penstock.launch.supervisor.report import Report
from penstock.protocol.config import Config
from penstock.protocol.messages.supervisor import Pulse, SupervisorReport
from penstock.protocol.run_folder import make_run_folder
from penstock.protocol.transport.context import Context


@pytest.fixture
def with_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[list[Running], Callable[[Report], None]], None]:
    """Hands a report about what runs to a function."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(running: list[Running], look: Callable[[Report], None]) -> None:
        async def main() -> None:
            make_run_folder(Config(name="p"))
            with Context() as context:
                processes = SimpleNamespace(context=context, running=lambda: running)
                children: Any = {one.name: SimpleNamespace(num_starts=3) for one in running}
                deaths = ExplainedDeaths({})
                pulses: Any = SimpleNamespace(newest=_pulse)
                kinds = ["gateway", "worker"]
                report = Report(Config(name="p"), kinds, processes, children, pulses, deaths)  # type: ignore[arg-type]
                look(report)
                report.close()

        asyncio.run(main())

    return run


def _pulse(name: str, pid: int) -> Pulse:
    return Pulse(name, pid, counters={"pid": pid}, cpu_seconds=2.5, rss_bytes=1 << 20)


def test_in_the_order_of_the_procfile(with_report: Callable[..., None]) -> None:
    def look(report: Report) -> None:
        gateway, worker = report.processes()
        assert (gateway.name, gateway.node) == ("gateway.1", "")
        assert (worker.name, worker.node) == ("worker.1", "gpu1")
        assert (worker.pid, worker.uptime, worker.restarts) == (17, 7.0, 2)
        assert (worker.counters, worker.cpu_seconds) == ({"pid": 17}, 2.5)
        assert worker.rss_bytes == 1 << 20

    with_report([Running("worker.1", 17, "gpu1", 7.0), Running("gateway.1", 18, "", 7.0)], look)


def test_one_report_waits_for_a_gateway(with_report: Callable[..., None]) -> None:
    with_report([], _expect_full)


def _expect_full(report: Report) -> None:
    report.drain()
    assert not report._channel.send(SupervisorReport([]))
