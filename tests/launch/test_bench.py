"""The benchmarks: what they ask for, what they print, and a small run of each."""

import contextlib
import ctypes
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.bench import figures as module
from penstock.launch.bench import pipeline
from penstock.launch.bench.commands import _show
from penstock.launch.bench.figures import (
    Figures,
    Stamps,
    arrivals,
    hardware,
    latency_table,
    load_figures,
    median,
    offline_table,
    percentile,
    serve_table,
    stream_figures,
    versions,
)
from penstock.launch.bench.model import Meter, Target
from penstock.launch.bench.options import (
    Item,
    ModelOptions,
    arrival_times,
    given_lengths,
    random_kinds,
    random_lengths,
    variant,
)
from penstock.launch.commands.gpus import physical_gpus
from penstock.launch.commands.status import as_json
from penstock.launch.pipeline import target as targets
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.session import PendingRequest
from penstock.protocol.config import Config
from penstock.protocol.messages.client import GenerateRequest, TextDelta
from tests.launch.conftest import Launch
from tests.launch.fake_gateway import Gateway, echo

SMALL = ("--num-threads", "1", "--kv-cache-gib", "0.1")
RUN = (
    *("completed", "failed", "total_input_tokens", "cached_tokens", "total_output_tokens"),
    *("duration", "request_throughput", "output_throughput", "total_token_throughput"),
    "preemptions",
)
HEADLINE = (
    "Qwen3-0.6B on NVIDIA H200, 8 CPU cores; python 3.12.1, torch 2.11.0; "
    "batches 1 16, temperature 0.6; --tp 2; prefix caching off; ready after 12.3 s"
)


def run_of(seconds: float, preemptions: int = 0) -> Figures:
    speed = (4 / seconds, 1000 / seconds, 3000 / seconds)
    return dict(zip(RUN, (4, 0, 2000, 0, 1000, seconds, *speed, preemptions), strict=True))


def streaming_of(ttft: float, tpot: float, itl: float, e2el: float) -> Figures:
    """Return mean, median, p90 and p99 of each: the value times 1, 2, 3 and 4."""
    means = {"ttft": ttft, "tpot": tpot, "itl": itl, "e2el": e2el}
    titles = {"mean": 1, "median": 2, "p90": 3, "p99": 4}
    return {f"{t}_{n}_ms": ms * by for n, ms in means.items() for t, by in titles.items()}


def stamps_of(start: float, *times: float, num_tokens: int) -> Stamps:
    one = Stamps(start, PendingRequest(b"0", GenerateRequest(prompt=[1])))
    one.times, one.num_tokens = list(times), num_tokens
    return one


def report_of(**results: object) -> dict[str, Any]:
    return {
        "model": "Qwen3-0.6B",
        "hardware": {"cpus": 8, "gpus": ["NVIDIA H200"]},
        "versions": {"python": "3.12.1", "torch": "2.11.0"},
        "workload": {"batches": [1, 16], "temperature": 0.6},
        "options": Config(name="x", tp=2, enable_prefix_caching=False),
        "ready_seconds": 12.34,
        **results,
    }


# ---- what is asked for ----------------------------------------------------------------------


def test_the_workload_is_that_of_nano_vllm() -> None:
    items = random_lengths(256, 100, 1024, 0)
    assert sum(len(item.prompt) for item in items) == 142_827
    assert sum(item.num_output_tokens for item in items) == 133_966
    assert items[0].prompt[:3] == [6311, 6890, 663]


def test_lengths_are_within_the_limits_and_follow_the_seed() -> None:
    items = random_lengths(300, 4, 8, 1)
    assert {len(item.prompt) for item in items} == {4, 5, 6, 7, 8}
    assert {item.num_output_tokens for item in items} == {4, 5, 6, 7, 8}
    assert items == random_lengths(300, 4, 8, 1) != random_lengths(300, 4, 8, 2)


def test_prompts_of_given_lengths_differ() -> None:
    items = given_lengths([7, 50] * 8, 9, 0)
    assert [(len(one.prompt), one.num_output_tokens) for one in items] == [(7, 9), (50, 9)] * 8
    assert len({tuple(item.prompt) for item in items}) == 16


def test_a_variant_has_other_tokens_of_the_vocabulary() -> None:
    items = [Item([0, 99, 10_000], 5)]
    assert variant(items, 0, 151_936) == items
    assert variant(items, 1, 151_936) == [Item([1, 100, 0], 5)]
    assert variant(items, -1, 100) == [Item([99, 98, 99], 5)]


def test_arrivals_are_a_poisson_process() -> None:
    times = arrival_times(20_000, 8.0, 0)
    gaps = [b - a for a, b in pairwise(times)]
    assert (times[0], len(times)) == (0.0, 20_000)
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.02)
    shorter = sum(gap < 1 / 8 for gap in gaps) / len(gaps)  # than the mean
    assert shorter == pytest.approx(1 - 1 / math.e, abs=0.01)


def test_arrivals_follow_the_seed_and_scale_with_the_rate() -> None:
    times = arrival_times(50, 8.0, 1)
    assert times == arrival_times(50, 8.0, 1) != arrival_times(50, 8.0, 2)
    assert arrival_times(50, 16.0, 1) == pytest.approx([time / 2 for time in times])


def test_the_share_of_long_prompts_is_kept() -> None:
    kinds = random_kinds(200, 0.1, 0)
    assert (kinds.count("long"), kinds.count("short")) == (20, 180)
    assert kinds == random_kinds(200, 0.1, 0) != random_kinds(200, 0.1, 1)
    assert len(set(random_kinds(200, 0.1, 1)[:100])) == 2
    assert (random_kinds(3, 0, 0), random_kinds(2, 1, 0)) == (["short"] * 3, ["long"] * 2)


@pytest.mark.parametrize(("max_concurrency", "num_sent"), [(0, 4), (2, 2)])
def test_requests_leave_though_none_is_answered_until_the_pipeline_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_concurrency: int, num_sent: int
) -> None:
    """As many as may be in flight at a time, with what the benchmark draws by default."""
    monkeypatch.setattr(targets, "SILENCE", 0.1)
    endpoint = f"ipc://{tmp_path}/clients"
    target = Target(endpoint, "", 8, Config(name="none"))
    with (
        contextlib.closing(Gateway(endpoint, echo)) as gateway,  # has no answer to token ids
        Meter(target, ModelOptions()) as meter,
        pytest.raises(LaunchError, match="pipeline 'none' ended before it answered"),
    ):
        items = [Item([number], 3) for number in range(4)]
        meter.run_load(items, [0.0, 0.01, 0.01, 0.03], max_concurrency)
    asked = [one for one in gateway.heard if isinstance(one, GenerateRequest)]
    assert [one.prompt for one in asked] == [[number] for number in range(num_sent)]
    drawn = {(one.temperature, one.top_k, one.top_p, one.min_p) for one in asked}
    assert drawn == {(0.6, -1, 1.0, 0.0)}  # not the model's own defaults


# ---- figures --------------------------------------------------------------------------------


def test_the_median_is_of_each_field() -> None:
    middle = median([run_of(1.0, 5), run_of(4.0, 0), run_of(2.0, 7)])
    assert (middle["duration"], middle["output_throughput"], middle["preemptions"]) == (2.0, 500, 5)
    assert type(median([run_of(1.0), run_of(2.0)])["total_output_tokens"]) is int


def test_percentiles() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (100.0, 198.0)
    assert percentile([3.0], 0.99) == 3.0
    assert math.isnan(percentile([], 0.5))


def test_the_figures_of_streams() -> None:
    two = [
        stamps_of(10.0, 10.5, 10.75, 11.5, num_tokens=5),  # its messages have several tokens
        stamps_of(20.0, 21.0, 21.5, num_tokens=2),
    ]
    figures = stream_figures(two)
    ttft, tpot, itl, e2el = (
        tuple(figures[f"{title}_{name}_ms"] for title in ("mean", "median", "p90", "p99"))
        for name in ("ttft", "tpot", "itl", "e2el")
    )
    assert (ttft, e2el) == ((750, 500, 1000, 1000), (1500, 1500, 1500, 1500))
    assert tpot == (375, 250, 500, 500)  # (11.5 - 10.5) / 4
    assert itl == (500, 500, 750, 750)
    assert stream_figures([*two, stamps_of(30.0, num_tokens=0)]) == figures  # it failed


def test_one_token_has_no_time_to_the_next() -> None:
    figures = stream_figures([stamps_of(1.0, 1.25, num_tokens=1)])
    assert (figures["mean_ttft_ms"], figures["median_e2el_ms"]) == (250, 250)
    assert math.isnan(figures["mean_tpot_ms"])
    assert math.isnan(figures["p99_itl_ms"])


def test_good_requests_keep_within_every_limit() -> None:
    one = stamps_of(10.0, 10.5, 11.5, num_tokens=5)  # ttft 500, tpot 250, e2el 1500
    assert one.is_good({"ttft": 500, "tpot": 250, "e2el": 1500})
    assert not one.is_good({"ttft": 499})
    assert not one.is_good({"ttft": 500, "tpot": 249})
    assert stamps_of(1.0, 1.25, num_tokens=1).is_good({"tpot": 0.1})  # it has none


def test_tokens_are_stamped_as_they_come_and_text_alone_is_not() -> None:
    def delta(offset: int, token_ids: list[int], text: str = "") -> TextDelta:
        ids = {"request_id": "x", "token_ids": token_ids}
        return TextDelta(**ids, token_offset=offset, char_offset=0, text=text)

    answer = PendingRequest(b"0", GenerateRequest(prompt=[1], stream=True))
    answer.add(delta(0, [7, 8]))
    stamps = Stamps(0.0, answer)  # made when the request is sent: one message is here already
    assert (len(stamps.times), stamps.num_tokens) == (1, 2)
    for one in (delta(2, [9]), delta(3, [], "x")):
        answer.add(one)
        answer.on_change()
    assert (len(stamps.times), stamps.num_tokens) == (2, 3)


def test_the_load_that_was_achieved() -> None:
    achieved = arrivals([5.0, 6.5, 7.25, 9.0], [0.0, 1.0, 2.0, 4.0])
    assert achieved == {"sent_per_second": 0.75, "latest_send_ms": 500}
    assert math.isnan(arrivals([5.0], [0.0])["sent_per_second"])


def test_the_summary_has_the_names_of_vllm() -> None:
    stamps = [
        stamps_of(0.0, 0.5, 1.0, num_tokens=3),
        stamps_of(1.0, 3.0, num_tokens=1),
        stamps_of(2.0, num_tokens=0),  # failed
    ]
    times = [0.0, 1.0, 2.0]
    runs = [load_figures(run_of(s), stamps, times, {"ttft": 600}) for s in (2.0, 4.0, 4.0)]
    found = median(runs)
    assert (found["duration"], found["output_throughput"]) == (4.0, 250)
    assert (found["total_input_tokens"], type(found["completed"])) == (2000, int)
    assert found["request_goodput"] == 0.25  # one in 4 s
    assert (found["mean_ttft_ms"], found["p99_ttft_ms"]) == (1250, 2000)
    assert math.isnan(load_figures(run_of(1.0), stamps, times, {})["request_goodput"])


# ---- what is printed ------------------------------------------------------------------------


def test_offline_as_a_table() -> None:
    runs = [run_of(0.5), run_of(0.25, 3)]
    headline, _, columns, _, *rows = offline_table(
        report_of(runs=runs, median=median(runs))
    ).splitlines()
    assert headline == HEADLINE
    assert columns.startswith("| run | requests | failed | prompt tokens | cached tokens | output ")
    assert rows == [
        "| 1 | 4 | 0 | 2,000 | 0 | 1,000 | 0.50 | 8.00 | 2,000 | 6,000 | 0 |",
        "| 2 | 4 | 0 | 2,000 | 0 | 1,000 | 0.25 | 16.00 | 4,000 | 12,000 | 3 |",
        "| median | 4 | 0 | 2,000 | 0 | 1,000 | 0.38 | 12.00 | 3,000 | 9,000 | 1 |",
    ]


def test_latency_as_a_table() -> None:
    streaming = streaming_of(6.1725, 1.0, 1.5, 99.0)
    batch = {"batch": 16, "median": run_of(0.5), "streaming": streaming}
    batch["gpu_idle_us"] = (1.25, 40.0)
    assert latency_table(report_of(batches=[batch])).splitlines()[2:] == [
        "| batch | seconds | output tokens/s | TTFT ms | ITL ms | ITL p99 ms | preemptions "
        "| GPU idle µs | p99 |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| 16 | 0.50 | 2,000 | 12.35 | 3.00 | 6.00 | 0 | 1.2 | 40.0 |",
    ]


def test_serve_as_a_table() -> None:
    kind = {"requests": 9, "idle": streaming_of(2.5, 1, 1, 1)}
    kind["median"] = streaming_of(5.0, 1.5, 1.75, 500.0)
    stamps = [stamps_of(0.0, 0.5, 1.0, num_tokens=3), stamps_of(0.25, 1.0, num_tokens=1)]
    load = load_figures(run_of(4.0), stamps, [0.0, 0.25], {"e2el": 800})
    row = "| 9 | 5.00 | 10.00 | 20.00 | 3.00 | 6.00 | 3.50 | 7.00 | 1,000.00 | 2,000.00 |"
    lines = serve_table(report_of(kinds={"short": kind, "long": kind}, **load)).splitlines()
    assert lines[2].startswith("| prompts | requests | TTFT idle ms | TTFT ms | p99 | TPOT ms | ")
    assert lines[4:6] == [f"| short {row}", f"| long {row}"]
    assert lines[7].startswith("| requests sent/s | latest send ms | requests/s | good ones/s | ")
    assert lines[9] == "| 4.00 | 0.00 | 1.00 | 0.25 | 250.00 | 4.00 | 4 | 0 | 0 |"


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


def test_json_goes_into_a_file_beside_the_table(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    _show({"a": math.nan}, lambda report: f"table of {report}", str(file))
    assert json.loads(file.read_text()) == {"a": None}
    assert capsys.readouterr().out == "table of {'a': nan}\n"
    with pytest.raises(LaunchError, match="--json /none/x: No such file"):
        _show({}, str, "/none/x")


def write_nvidia_smi(folder: Path, text: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


def test_hardware_with_and_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware()["gpus"] == []
    write_nvidia_smi(tmp_path, "echo NVIDIA H200, 143771; echo 'NVIDIA GB10, [N/A]'")
    assert hardware()["gpus"] == ["NVIDIA H200", "NVIDIA GB10"]
    assert physical_gpus() == [("NVIDIA H200", 143_771 << 20), ("NVIDIA GB10", 0)]
    assert hardware()["cpus"] >= 1


@pytest.mark.parametrize(
    ("output", "code", "with_driver"),
    [
        ("no driver", 9, None),
        ("Unable to determine the device handle: GPU is lost", 15, None),
        ("No devices were found", 6, []),
    ],
)
def test_nvidia_smi_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, code: int, with_driver: object
) -> None:
    """With a driver, the worker finds out how many GPUs there are."""
    monkeypatch.setenv("PATH", str(tmp_path))
    drivers: list[str] = []

    def load(name: str) -> None:
        if name not in drivers:
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    write_nvidia_smi(tmp_path, f"echo '{output}'; exit {code}")
    assert physical_gpus() == []
    drivers.append("libcuda.so.1")
    assert physical_gpus() == with_driver


def test_a_package_that_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(versions()) == {"python", "penstock", "torch"}

    def version(name: str) -> str:
        raise module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", version)
    assert set(versions()) == {"python"}


# ---- small runs -----------------------------------------------------------------------------


@pytest.mark.pipeline
def test_offline(launch: Launch) -> None:
    """Four sequences of 32 to 64 tokens in 6 blocks of 16: each run preempts about as often."""
    workload = ("--num-requests", "4", "--min-tokens", "16", "--max-tokens", "32")
    more = ("--block-size", "16", "--num-blocks", "6", "--runs", "3", "--json")
    report = json.loads(launch("bench", "offline", *workload, *SMALL, *more).out)
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
def test_the_pipeline_without_a_model(monkeypatch: pytest.MonkeyPatch, launch: Launch) -> None:
    monkeypatch.setattr(pipeline, "MIN_SECONDS", 0.1)
    numbers = ("--batches", "2", "--detokenizers", "1", "--max-tokens", "20", "--runs", "1")
    results = json.loads(launch("bench", "pipeline", *numbers, "--json").out)
    assert [(one["batch"], one["stream"]) for one in results] == [(2, False), (2, True)]


@pytest.mark.pipeline
def test_serve(measured: Config, launch: Launch) -> None:
    workload = ("--num-requests", "8", "--request-rate", "20", "--input-tokens", "6")
    long = ("--long-input-tokens", "40", "--long-share", "0.25", "--output-tokens", "4")
    more = ("--runs", "2", "--name", measured.name, "--goodput", "ttft:60000", "--json")
    report = json.loads(launch("bench", "serve", *workload, *long, *more).out)
    assert report["workload"]["request_rate"] == 20
    assert report["workload"]["goodput"] == {"ttft": 60000}
    assert len(report["runs"]) == 2
    for run in [*report["runs"], report]:
        assert (run["completed"], run["failed"]) == (8, 0)
        assert run["total_input_tokens"] == 6 * 6 + 2 * 40
        assert (run["total_output_tokens"], run["cached_tokens"], run["preemptions"]) == (32, 0, 0)
        assert 0 < run["sent_per_second"] < 2 * 7 / arrival_times(8, 20, 0)[-1]  # none is early
        assert run["latest_send_ms"] >= 0
        assert 0 < run["request_throughput"] < run["output_throughput"]
        assert run["request_goodput"] == pytest.approx(run["request_throughput"])
    numbers = {kind: one["requests"] for kind, one in report["kinds"].items()}
    assert numbers == {"short": 6, "long": 2}
    for one in report["kinds"].values():
        for figures in (one["idle"], *one["runs"], one["median"]):
            assert 0 < figures["median_ttft_ms"] <= figures["p99_ttft_ms"]
            for name in ("itl", "tpot"):  # 0 or None where all tokens came in one piece
                assert 0 <= (figures[f"median_{name}_ms"] or 0) <= (figures[f"p99_{name}_ms"] or 0)
            assert figures["p99_ttft_ms"] <= figures["p99_e2el_ms"]


@pytest.mark.pipeline
def test_latency_of_a_running_pipeline(measured: Config, launch: Launch) -> None:
    workload = ("--batches", "1", "3", "--input-tokens", "6", "--output-tokens", "4")
    arguments = ("bench", "latency", *workload, "--runs", "1")
    report = json.loads(launch(*arguments, "--name", measured.name, "--json").out)
    where = ("--endpoint", measured.endpoint, "--model", str(measured.model_folder))
    table = launch(*arguments, *where).out
    assert report["options"]["name"] == measured.name
    assert report["ready_seconds"] is None
    assert [one["batch"] for one in report["batches"]] == [1, 3]
    for one in report["batches"]:
        assert [run["total_output_tokens"] for run in one["runs"]] == [4 * one["batch"]]
        assert one["streaming"]["median_ttft_ms"] > 0
        median, worst = (one["streaming"][f"{name}_itl_ms"] for name in ("median", "p99"))
        assert (worst or 0) >= (median or 0) >= 0  # None where all tokens came in one piece
    assert [line[:5] for line in table.splitlines()[-2:]] == ["| 1 |", "| 3 |"]
    assert "prefix caching" not in table  # what the endpoint's options are is not known
