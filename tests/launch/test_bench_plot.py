"""`launch bench plot`."""

import sys
from pathlib import Path

import pytest

from penstock.launch.bench.plot import plot, points
from penstock.launch.bench.report import as_json
from penstock.launch.bench.serving import summary
from penstock.launch.errors import LaunchError
from tests.launch.test_bench import report_of, run_of, streaming_of
from tests.launch.test_bench_serve import stamps_of


@pytest.fixture
def results(tmp_path: Path) -> list[Path]:
    """Of `serve` at two rates, and of `latency`."""
    files = []
    for rate, seconds in ((2.0, 4.0), (8.0, 1.0)):
        stamps = [stamps_of(0.0, 0.5, 1.0, num_tokens=3)]
        load = summary([(run_of(seconds), stamps)], [0.0], {})
        report = report_of(**load, http=load) | {"subject": "serve"}
        report["workload"] = {"request_rate": rate}
        files.append(tmp_path / f"{rate}.json")
        files[-1].write_text(as_json(report))
    batch = {"batch": 16, "median": run_of(0.5), "streaming": streaming_of(1, 2, 3, 4)}
    files.append(tmp_path / "latency.json")
    files[-1].write_text(as_json(report_of(batches=[batch]) | {"subject": "latency"}))
    return files


def test_every_load_is_a_point(results: list[Path]) -> None:
    found = [point for file in results for point in points(file)]
    assert [(one.series, one.label, one.throughput) for one in found] == [
        ("Qwen3-0.6B", "2/s", 250),
        ("Qwen3-0.6B, HTTP", "2/s", 250),
        ("Qwen3-0.6B", "8/s", 1000),
        ("Qwen3-0.6B, HTTP", "8/s", 1000),
        ("Qwen3-0.6B, batches", "16", 2000),
    ]
    assert found[0].figures["median_ttft_ms"] == 500
    assert found[-1].figures["p99_itl_ms"] == 12


def test_a_plot(results: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "plot.svg"
    plot(results, output)
    assert output.read_text().startswith("<?xml")
    with pytest.raises(LaunchError, match=r"--output .*plot\.nonsense: Format 'nonsense'"):
        plot(results, tmp_path / "plot.nonsense")


def test_what_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(LaunchError, match=r"x\.json is no result of"):
            list(points(file))
    file.write_text(as_json(report_of()))
    with pytest.raises(LaunchError, match="is of `launch bench offline`, which has no latencies"):
        list(points(file))
    with pytest.raises(LaunchError, match="none: No such file"):
        list(points(tmp_path / "none"))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LaunchError, match="a plot needs matplotlib: pip install"):
        plot([], tmp_path / "x.png")
