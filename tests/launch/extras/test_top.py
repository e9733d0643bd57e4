"""`launch top`: its figures, and the table of a pipeline that runs."""

import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from penstock.launch.extras.top import Report, quantile, view
from penstock.protocol.config import Config
from penstock.protocol.messages.status import (
    Histogram,
    Metrics,
    ProcessStatus,
    SchedulerStatus,
    StatusReply,
)
from tests.launch.fake_gateway import STATUS

TOP = [sys.executable, "-P", "-m", "penstock.launch", "top"]


def metrics_of(tokens: int, *ttft: float) -> Metrics:
    histograms = {
        field: Histogram.of([0.1, 0.2, 0.4])
        for field in Metrics.__struct_fields__
        if field.endswith("_seconds")
        or (field.startswith("request_") and field.endswith(("_tokens", "_n")))
    }
    for seconds in ttft:
        histograms["time_to_first_token_seconds"].add(seconds)
    return Metrics(prompt_tokens=tokens, generation_tokens=2 * tokens, **histograms)


def report_of(moment: float, metrics: Metrics | None, cpu: float = 0.0) -> Report:
    worker = ProcessStatus(
        name="worker.1", pid=7, uptime=3661.5, restarts=2, cpu_seconds=cpu, rss_bytes=3 << 20
    )
    scheduler = SchedulerStatus(
        epoch=1, ready=True, num_waiting=3, num_running=5, num_blocks=10, num_free_blocks=4
    )
    running = {"num_requests": 8, "schedulers": [scheduler], "processes": [worker]}
    return Report(moment, StatusReply(ready=True, **STATUS | running, metrics=metrics))


def rows(before: Report, now: Report, oldest: Report | None) -> list[list[str]]:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(view(Config(name="x"), before, now, oldest))
    return [
        line.strip("│").replace("│", " ").split() for line in console.export_text().splitlines()
    ]


def test_quantiles_are_those_of_prometheus() -> None:
    bounds = [0.1, 0.2, 0.4]
    assert quantile(bounds, [0, 4, 0, 0], 0.5) == "150.0"
    assert quantile(bounds, [2, 0, 2, 0], 0.5) == "100.0"
    assert quantile(bounds, [2, 0, 2, 0], 0.75) == "300.0"
    assert quantile(bounds, [1, 0, 0, 9], 0.9) == "> 400"
    assert quantile(bounds, [0, 0, 0, 0], 0.9) == "-"


def test_rates_are_those_between_two_reports() -> None:
    found = rows(
        report_of(10.0, metrics_of(100), 1.0), report_of(10.5, metrics_of(150), 1.25), None
    )
    assert ["8", "3", "5", "60%", "100", "200"] in found
    assert ["worker.1", "7", "1:01:01", "2", "50%", "3"] in found


def test_a_new_gateway_counts_from_nothing() -> None:
    old = report_of(10.0, metrics_of(100, 0.15, 0.15))
    found = rows(old, report_of(10.5, metrics_of(5, 0.3)), old)
    assert ["8", "3", "5", "60%", "0", "0"] in found
    assert ["TTFT", "300.0", "380.0", "398.0"] in found


def test_percentiles_are_of_the_reports_that_are_kept() -> None:
    old = report_of(10.0, metrics_of(100, 0.15, 0.15))
    now = report_of(12.0, metrics_of(100, 0.15, 0.15, 0.3))
    found = rows(old, now, old)
    assert ["TTFT", "300.0", "380.0", "398.0"] in found
    assert ["ms,", "last", "2", "s", "p50", "p90", "p99"] in [
        [w for w in row if w != "┃"] for row in found
    ]
    assert ["TTFT", "175.0", "340.0", "394.0"] in rows(old, now, None)
    assert ["ITL", "-", "-", "-"] in found


@pytest.mark.parametrize(("has_keyboard", "key"), [(True, "q"), (False, "Ctrl-C")])
def test_only_a_live_table_names_the_key_that_quits(
    monkeypatch: pytest.MonkeyPatch, has_keyboard: bool, key: str
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: has_keyboard, raising=False)
    old, now = report_of(10, None), report_of(12, None)
    assert "quits" not in rows(old, now, None)[0]
    assert rows(old, now, old)[0][-2:] == [key, "quits"]


def test_without_metrics() -> None:
    assert ["8", "3", "5", "60%", "-", "-"] in rows(report_of(1, None), report_of(2, None), None)


@pytest.mark.pipeline
@pytest.mark.parametrize("options", [["--once"], []], ids=["asked for", "without a terminal"])
def test_once(measured: Config, options: list[str]) -> None:
    printed = subprocess.run(
        [*TOP, "--name", measured.name, *options], capture_output=True, text=True, check=True
    ).stdout
    for word in ("ready", "gateway.1", "worker.1", "KV in use", "decode tok/s", "p99"):
        assert word in printed
    assert "quits" not in printed


@pytest.mark.pipeline
def test_q_quits(measured: Config) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*TOP, "--name", measured.name], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while b"worker.1" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"xq")
        with pytest.raises(OSError, match="Input/output"):
            while True:
                os.read(ours, 4096)
        assert process.wait() == 0
    os.close(ours)
