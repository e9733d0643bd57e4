"""`launch bench serve`: times of requests and their summary; benchmarks of a running pipeline."""

import contextlib
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.launch.bench.figures import (
    Stamps,
    arrivals,
    load_figures,
    median,
    serve_table,
    stream_figures,
)
from penstock.launch.bench.model import Meter, Target
from penstock.launch.bench.options import (
    Item,
    ModelOptions,
    arrival_times,
    given_lengths,
    random_kinds,
)
from penstock.launch.commands.cli import main
from penstock.launch.pipeline import target as targets
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.session import Answer
from penstock.protocol.config import Config
from penstock.protocol.messages.client import GenerateRequest, TextDelta
from tests.launch.fake_gateway import Gateway, echo
from tests.launch.test_bench import HEADLINE, bench, report_of, run_of, streaming_of


def stamps_of(start: float, *times: float, num_tokens: int) -> Stamps:
    one = Stamps(start, Answer(b"0", GenerateRequest(prompt=[1])))
    one.times, one.num_tokens = list(times), num_tokens
    return one


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
    assert arrival_times(1, 8.0, 1) == [0.0]


def test_the_share_of_long_prompts_is_kept() -> None:
    kinds = random_kinds(200, 0.1, 0)
    assert (kinds.count("long"), kinds.count("short")) == (20, 180)
    assert kinds == random_kinds(200, 0.1, 0) != random_kinds(200, 0.1, 1)
    assert len(set(random_kinds(200, 0.1, 1)[:100])) == 2
    assert (random_kinds(3, 0, 0), random_kinds(2, 1, 0)) == (["short"] * 3, ["long"] * 2)


def test_given_lengths() -> None:
    items = given_lengths([3, 50, 3], 9, 0)
    assert [(len(item.prompt), item.num_output_tokens) for item in items] == [
        (3, 9),
        (50, 9),
        (3, 9),
    ]


def test_the_figures_of_streams() -> None:
    two = [
        stamps_of(10.0, 10.5, 10.75, 11.5, num_tokens=5),  # its messages have several tokens
        stamps_of(20.0, 21.0, 21.5, num_tokens=2),
    ]
    figures = stream_figures(two)
    assert figures["mean_ttft_ms"] == 750
    assert (figures["median_ttft_ms"], figures["p90_ttft_ms"], figures["p99_ttft_ms"]) == (
        500,
        1000,
        1000,
    )
    assert (figures["median_tpot_ms"], figures["p99_tpot_ms"]) == (250, 500)  # (11.5 - 10.5) / 4
    assert (figures["mean_itl_ms"], figures["median_itl_ms"], figures["p99_itl_ms"]) == (
        500,
        500,
        750,
    )
    assert (figures["mean_e2el_ms"], figures["p99_e2el_ms"]) == (1500, 1500)
    failed = stamps_of(30.0, num_tokens=0)
    assert stream_figures([*two, failed]) == figures


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
        return TextDelta(
            request_id="x", token_offset=offset, char_offset=0, token_ids=token_ids, text=text
        )

    answer = Answer(b"0", GenerateRequest(prompt=[1], stream=True))
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
    assert (found["mean_ttft_ms"], found["median_ttft_ms"], found["p99_ttft_ms"]) == (
        1250,
        500,
        2000,
    )
    assert math.isnan(load_figures(run_of(1.0), stamps, times, {})["request_goodput"])


def test_serve_as_a_table() -> None:
    kind = {"requests": 9, "idle": streaming_of(2.5, 1, 1, 1)}
    kind["median"] = streaming_of(5.0, 1.5, 1.75, 500.0)
    stamps = [stamps_of(0.0, 0.5, 1.0, num_tokens=3), stamps_of(0.25, 1.0, num_tokens=1)]
    load = load_figures(run_of(4.0), stamps, [0.0, 0.25], {"e2el": 800})
    row = "| 9 | 5.00 | 10.00 | 20.00 | 3.00 | 6.00 | 3.50 | 7.00 | 1,000.00 | 2,000.00 |"
    lines = serve_table(report_of(kinds={"short": kind, "long": kind}, **load)).splitlines()
    assert lines == [
        HEADLINE,
        "",
        "| prompts | requests | TTFT idle ms | TTFT ms | p99 | TPOT ms | p99 | ITL ms | p99 "
        "| E2EL ms | p99 |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
        f"| short {row}",
        f"| long {row}",
        "",
        "| requests sent/s | latest send ms | requests/s | good ones/s | output tokens/s "
        "| seconds | completed | failed | preemptions |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| 4.00 | 0.00 | 1.00 | 0.25 | 250.00 | 4.00 | 4 | 0 | 0 |",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--request-rate", "0", ": got '0', expected `float` > 0.0"),
        ("--request-rate", "inf", ": got 'inf', expected"),
        ("--request-rate", "fast", ": got 'fast', expected `float`"),
        ("--long-share", "2", ": got '2', expected `float` <= 1.0"),
        ("--long-share", "nan", ": got 'nan', expected"),
        ("--num-requests", "0", ": got '0', expected `int` >= 1"),
        ("--goodput", "itl:5", ": 'itl:5' is none of ttft, tpot, e2el with :MILLISECONDS"),
        ("--goodput", "ttft:-5", ": got '-5', expected a finite number above 0"),
    ],
)
def test_options_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    sentence: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["launch", "bench", "serve", flag, value])
    with pytest.raises(SystemExit):
        main()
    assert f"{flag}{sentence}" in capsys.readouterr().err


@pytest.mark.parametrize(("max_concurrency", "num_sent"), [(0, 4), (2, 2)])
def test_requests_leave_though_none_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_concurrency: int, num_sent: int
) -> None:
    """As many as may be in flight at a time."""
    monkeypatch.setattr(targets, "SILENCE", 0.1)
    endpoint = f"ipc://{tmp_path}/clients"
    target = Target(endpoint, "", 8, Config(name="none"))
    with (
        contextlib.closing(Gateway(endpoint, echo)) as gateway,  # has no answer to token ids
        Meter(target, ModelOptions(temperature=0.0)) as meter,
        pytest.raises(LaunchError, match="ended before it answered"),
    ):
        items = [Item([number], 3) for number in range(4)]
        meter.run_load(items, [0.0, 0.01, 0.01, 0.03], max_concurrency)
    prompts = [one.prompt for one in gateway.heard if isinstance(one, GenerateRequest)]
    assert prompts == [[number] for number in range(num_sent)]


@pytest.mark.pipeline
def test_serve(
    measured: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = ("--num-requests", "8", "--request-rate", "20", "--input-tokens", "6")
    long = ("--long-input-tokens", "40", "--long-share", "0.25", "--output-tokens", "4")
    more = ("--runs", "2", "--name", measured.name, "--goodput", "ttft:60000", "--json")
    arguments = ("serve", *workload, *long, *more)
    report = json.loads(bench(monkeypatch, capsys, *arguments))
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
    assert {kind: one["requests"] for kind, one in report["kinds"].items()} == {
        "short": 6,
        "long": 2,
    }
    for one in report["kinds"].values():
        for figures in (one["idle"], *one["runs"], one["median"]):
            assert 0 < figures["median_ttft_ms"] <= figures["p99_ttft_ms"]
            for name in ("itl", "tpot"):  # 0 or None where all tokens came in one piece
                assert 0 <= (figures[f"median_{name}_ms"] or 0) <= (figures[f"p99_{name}_ms"] or 0)
            assert figures["p99_ttft_ms"] <= figures["p99_e2el_ms"]


@pytest.mark.pipeline
def test_latency_of_a_running_pipeline(
    measured: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = ("--batches", "1", "3", "--input-tokens", "6", "--output-tokens", "4")
    arguments = ("latency", *workload, "--runs", "1")
    report = json.loads(bench(monkeypatch, capsys, *arguments, "--name", measured.name, "--json"))
    where = ("--endpoint", measured.endpoint, "--model", str(measured.model_folder))
    table = bench(monkeypatch, capsys, *arguments, *where)
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
