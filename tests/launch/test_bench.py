"""The benchmarks: what they ask for, what they print, and a small run of each."""

import contextlib
import ctypes
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.bench import figures as module
from penstock.launch.bench import pipeline
from penstock.launch.bench.commands import _show
from penstock.launch.bench.figures import (
    Figures,
    hardware,
    latency_table,
    median,
    offline_table,
    percentile,
    versions,
)
from penstock.launch.bench.model import Meter, Target
from penstock.launch.bench.options import Item, ModelOptions, given_lengths, random_lengths, variant
from penstock.launch.commands.cli import main
from penstock.launch.commands.gpus import physical_gpus
from penstock.launch.commands.status import as_json
from penstock.launch.pipeline import target as targets
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config
from penstock.protocol.messages.client import GenerateRequest
from tests.launch.fake_gateway import Gateway, echo

SMALL = ("--num-threads", "1", "--kv-cache-gib", "0.1")


def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """Return the output of `launch bench`."""
    monkeypatch.setattr(sys, "argv", ["launch", "bench", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert end.value.code == 0, printed.err
    return printed.out


RUN = (
    *("completed", "failed", "total_input_tokens", "cached_tokens", "total_output_tokens"),
    *("duration", "request_throughput", "output_throughput", "total_token_throughput"),
    "preemptions",
)


def run_of(seconds: float, preemptions: int = 0) -> Figures:
    speed = (4 / seconds, 1000 / seconds, 3000 / seconds)
    return dict(zip(RUN, (4, 0, 2000, 0, 1000, seconds, *speed, preemptions), strict=True))


def streaming_of(ttft: float, tpot: float, itl: float, e2el: float) -> Figures:
    """Return mean, median, p90 and p99 of each: the value times 1, 2, 3 and 4."""
    means = {"ttft": ttft, "tpot": tpot, "itl": itl, "e2el": e2el}
    titles = {"mean": 1, "median": 2, "p90": 3, "p99": 4}
    return {f"{t}_{n}_ms": ms * by for n, ms in means.items() for t, by in titles.items()}


def report_of(**results: object) -> dict[str, Any]:
    return {
        "subject": "offline",
        "model": "Qwen3-0.6B",
        "hardware": {"cpus": 8, "gpus": ["NVIDIA H200"]},
        "versions": {"python": "3.12.1", "torch": "2.11.0"},
        "workload": {"batches": [1, 16], "temperature": 0.6},
        "options": Config(name="x", tp=2, enable_prefix_caching=False),
        "ready_seconds": 12.34,
        **results,
    }


HEADLINE = (
    "Qwen3-0.6B on NVIDIA H200, 8 CPU cores; python 3.12.1, torch 2.11.0; "
    "batches 1 16, temperature 0.6; --tp 2; prefix caching off; ready after 12.3 s"
)


def test_the_workload_is_that_of_nano_vllm() -> None:
    items = random_lengths(256, 100, 1024, 0)
    assert sum(len(item.prompt) for item in items) == 142_827
    assert sum(item.num_output_tokens for item in items) == 133_966
    assert items[0].prompt[:3] == [6311, 6890, 663]
    assert {type(token) for item in items for token in item.prompt} == {int}


def test_lengths_are_within_the_limits_and_follow_the_seed() -> None:
    items = random_lengths(300, 4, 8, 1)
    assert {len(item.prompt) for item in items} == {4, 5, 6, 7, 8}
    assert {item.num_output_tokens for item in items} == {4, 5, 6, 7, 8}
    assert items == random_lengths(300, 4, 8, 1) != random_lengths(300, 4, 8, 2)


def test_prompts_of_one_length_differ() -> None:
    items = given_lengths([7] * 16, 9, 0)
    assert [(len(item.prompt), item.num_output_tokens) for item in items] == [(7, 9)] * 16
    assert len({tuple(item.prompt) for item in items}) == 16


def test_a_variant_has_other_tokens_of_the_vocabulary() -> None:
    items = [Item([0, 99, 10_000], 5)]
    assert variant(items, 0, 151_936) == items
    assert variant(items, 1, 151_936) == [Item([1, 100, 0], 5)]
    assert variant(items, -1, 100) == [Item([99, 98, 99], 5)]


def test_the_median_is_of_each_field() -> None:
    middle = median([run_of(1.0, 5), run_of(4.0, 0), run_of(2.0, 7)])
    assert (middle["duration"], middle["output_throughput"], middle["preemptions"]) == (2.0, 500, 5)
    assert type(median([run_of(1.0), run_of(2.0)])["total_output_tokens"]) is int


def test_percentiles() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (100.0, 198.0)
    assert percentile([3.0], 0.99) == 3.0
    assert math.isnan(percentile([], 0.5))


def test_offline_as_a_table() -> None:
    runs = [run_of(0.5), run_of(0.25, 3)]
    assert offline_table(report_of(runs=runs, median=median(runs))).splitlines() == [
        HEADLINE,
        "",
        "| run | requests | failed | prompt tokens | cached tokens | output tokens | seconds "
        "| requests/s | output tokens/s | total tokens/s | preemptions |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| 1 | 4 | 0 | 2,000 | 0 | 1,000 | 0.50 | 8.00 | 2,000 | 6,000 | 0 |",
        "| 2 | 4 | 0 | 2,000 | 0 | 1,000 | 0.25 | 16.00 | 4,000 | 12,000 | 3 |",
        "| median | 4 | 0 | 2,000 | 0 | 1,000 | 0.38 | 12.00 | 3,000 | 9,000 | 1 |",
    ]


def test_latency_as_a_table() -> None:
    streaming = streaming_of(6.1725, 1.0, 1.5, 99.0)
    batch = {"batch": 16, "median": run_of(0.5), "streaming": streaming}
    batch["gpu_idle_us"] = (1.25, 40.0)
    assert latency_table(report_of(batches=[batch])).splitlines() == [
        HEADLINE,
        "",
        "| batch | seconds | output tokens/s | TTFT ms | ITL ms | ITL p99 ms | preemptions "
        "| GPU idle µs | p99 |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| 16 | 0.50 | 2,000 | 12.35 | 3.00 | 6.00 | 0 | 1.2 | 40.0 |",
    ]


def test_json_has_every_fact() -> None:
    runs = [run_of(0.5)]
    streaming = streaming_of(1.0, math.nan, math.nan, 1.0)  # of one token there is no second
    report = json.loads(as_json(report_of(runs=runs, streaming=streaming)))
    assert report["hardware"] == {"cpus": 8, "gpus": ["NVIDIA H200"]}
    assert report["options"]["tp"] == 2
    assert report["runs"][0]["output_throughput"] == 2000
    shown = report["streaming"]
    assert (shown["mean_ttft_ms"], shown["median_itl_ms"]) == (1.0, None)
    assert (shown["p90_ttft_ms"], shown["p99_e2el_ms"]) == (3.0, 4.0)


def test_hardware_with_and_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware()["gpus"] == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200, 143771\necho NVIDIA GB10, [N/A]\n")
    tool.chmod(0o755)
    assert hardware()["gpus"] == ["NVIDIA H200", "NVIDIA GB10"]
    assert physical_gpus() == [("NVIDIA H200", 143_771 << 20), ("NVIDIA GB10", 0)]
    assert hardware()["cpus"] >= 1


def test_nvidia_smi_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a driver, the worker finds out how many GPUs there are."""
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    drivers: list[str] = []

    def load(name: str) -> None:
        if name not in drivers:
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    for output, code, without_driver, with_driver in (
        ("no driver", 9, [], None),
        ("Unable to determine the device handle: GPU is lost", 15, [], None),
        ("No devices were found", 6, [], []),
    ):
        tool.write_text(f"#!/bin/sh\necho '{output}'; exit {code}\n")
        tool.chmod(0o755)
        drivers.clear()
        assert physical_gpus() == without_driver
        drivers.append("libcuda.so.1")
        assert physical_gpus() == with_driver


def test_a_package_that_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(versions()) == {"python", "penstock", "torch"}

    def version(name: str) -> str:
        raise module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", version)
    assert set(versions()) == {"python"}


def test_json_goes_into_a_file_beside_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    _show({"a": math.nan}, lambda report: f"table of {report}", str(file))
    assert json.loads(file.read_text()) == {"a": None}
    assert capsys.readouterr().out == "table of {'a': nan}\n"
    with pytest.raises(LaunchError, match="--json /none/x: No such file"):
        _show({}, str, "/none/x")


def test_a_pipeline_that_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "SILENCE", 0.1)
    endpoint = f"ipc://{tmp_path}/clients"
    target = Target(endpoint, "", 8, Config(name="none"))
    # this gateway has no answer to a prompt of token ids
    with (
        contextlib.closing(Gateway(endpoint, echo)) as gateway,
        Meter(target, ModelOptions()) as meter,
        pytest.raises(LaunchError, match="pipeline 'none' ended before it answered"),
    ):
        meter.run([Item([1, 2], 3)])
    (asked,) = [one for one in gateway.heard if isinstance(one, GenerateRequest)]
    drawn = asked.temperature, asked.top_k, asked.top_p, asked.min_p
    assert drawn == (0.6, -1, 1.0, 0.0)  # not the model's own defaults


@pytest.mark.pipeline
def test_offline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Four sequences of 32 to 64 tokens in 6 blocks of 16: each run preempts about as often."""
    workload = ("--num-requests", "4", "--min-tokens", "16", "--max-tokens", "32")
    more = ("--block-size", "16", "--num-blocks", "6", "--runs", "3", "--json")
    report = json.loads(bench(monkeypatch, capsys, "offline", *workload, *SMALL, *more))
    assert (report["subject"], report["model"]) == ("offline", "Qwen3 demo")
    assert report["workload"]["max_tokens"] == 32
    options = report["options"]
    assert (options["num_blocks"], options["enable_prefix_caching"]) == (6, False)
    items = random_lengths(4, 16, 32, 0)
    assert len(report["runs"]) == 3
    for run in [*report["runs"], report["median"]]:
        assert (run["completed"], run["failed"], run["cached_tokens"]) == (4, 0, 0)
        assert run["total_input_tokens"] == sum(len(item.prompt) for item in items)
        assert run["total_output_tokens"] == sum(item.num_output_tokens for item in items)
        assert 0 < run["output_throughput"] < run["total_token_throughput"]
    first, second, third = (run["preemptions"] for run in report["runs"])
    assert first > 0
    assert 0 < third < first + second  # they are of the run alone
    assert report["ready_seconds"] > 0


@pytest.mark.pipeline
def test_the_pipeline_without_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "MIN_SECONDS", 0.1)
    numbers = ("--batches", "2", "--detokenizers", "1", "--max-tokens", "20", "--runs", "1")
    results = json.loads(bench(monkeypatch, capsys, "pipeline", *numbers, "--json"))
    assert [(one["batch"], one["stream"]) for one in results] == [(2, False), (2, True)]
