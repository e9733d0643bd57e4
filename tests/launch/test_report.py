"""What is told of processes that come and go."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.launch.report import Report
from penstock.protocol.config import Config, make_run_folder
from penstock.protocol.messages import SupervisorReport


def watcher(name: str, *pids: int) -> SimpleNamespace:
    """As circus has it."""
    processes = {pid: SimpleNamespace(pid=pid, age=lambda: 7.0) for pid in pids}
    return SimpleNamespace(name=name, processes=processes)


@pytest.fixture
def with_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[list[Any], Callable[[Report], None]], None]:
    """Hands a report about these watchers to a function."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(watchers: list[Any], look: Callable[[Report], None]) -> None:
        async def main() -> None:
            make_run_folder(Config(name="p"))
            report = Report(
                Config(name="p"),
                ["gateway", "worker"],
                SimpleNamespace(watchers=watchers),
                {one.name: SimpleNamespace(num_starts=3) for one in watchers},  # type: ignore[misc]
                SimpleNamespace(counters=lambda pid: {"pid": pid}),  # type: ignore[arg-type]
            )
            look(report)
            report.close()

        asyncio.run(main())

    return run


def test_in_the_order_of_the_procfile(with_report: Callable[..., None]) -> None:
    own = os.getpid()

    def look(report: Report) -> None:
        for _ in range(2):
            worker, gateway = report.processes()[::-1]
            assert (gateway.name, worker.name) == ("gateway.1", "worker.1")
            assert (worker.pid, worker.uptime, worker.restarts) == (own, 7.0, 2)
            assert worker.counters == {"pid": own}
            assert worker.cpu_seconds > 0
            assert worker.rss_bytes > 1 << 20

    with_report([watcher("worker.1", own), watcher("gateway.1", own)], look)


def test_a_process_that_is_gone_is_left_out(with_report: Callable[..., None]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        workers = watcher("worker.1", child.pid, os.getpid())

        def look(report: Report) -> None:
            assert [one.pid for one in report.processes()] == [child.pid, os.getpid()]
            child.communicate(b"\n")
            for _ in range(2):
                assert [one.pid for one in report.processes()] == [os.getpid()]

        with_report([workers], look)


def test_one_report_waits_for_a_gateway(with_report: Callable[..., None]) -> None:
    """The first one, which was sent at once."""
    with_report([], _expect_full)


def _expect_full(report: Report) -> None:
    assert not report._channel.send(SupervisorReport([]))
