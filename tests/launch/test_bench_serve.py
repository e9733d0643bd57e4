"""`launch bench serve`: when requests arrive, what is made of their times, and a small run."""

import contextlib
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.launch.bench import measure
from penstock.launch.bench.measure import Load, Meter, as_load
from penstock.launch.bench.report import serve_table
from penstock.launch.bench.streams import Stamps, Streaming, as_streaming
from penstock.launch.bench.target import Target
from penstock.launch.bench.workload import (
    Item,
    arrival_times,
    fixed_lengths,
    given_lengths,
    random_kinds,
)
from penstock.launch.cli import main
from penstock.launch.errors import LaunchError
from penstock.launch.session import Answer
from penstock.protocol.client import GenerateRequest, TextDelta
from penstock.protocol.config import Config
from tests.launch.fake_gateway import Gateway, echo
from tests.launch.test_bench import HEADLINE, bench, report_of, run_of


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
    assert given_lengths([7, 7], 9, 0) == fixed_lengths(2, 7, 9, 0)


def test_the_figures_of_streams() -> None:
    two = [
        stamps_of(10.0, 10.5, 10.75, 11.5, num_tokens=5),  # its messages have several tokens
        stamps_of(20.0, 21.0, 21.5, num_tokens=2),
    ]
    assert as_streaming(two) == Streaming(
        ttft_ms=500,
        ttft_p99_ms=1000,
        tpot_ms=250,  # (11.5 - 10.5) / 4
        tpot_p99_ms=500,
        itl_ms=500,
        itl_p99_ms=750,
        e2el_ms=1500,
        e2el_p99_ms=1500,
    )


def test_one_token_has_no_time_to_the_next() -> None:
    figures = as_streaming([stamps_of(1.0, 1.25, num_tokens=1)])
    assert (figures.ttft_ms, figures.e2el_ms) == (250, 250)
    assert math.isnan(figures.tpot_ms)
    assert math.isnan(figures.itl_p99_ms)


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
    load = as_load(run_of(2.0), [0.0, 1.5, 2.25, 4.0], [0.0, 1.0, 2.0, 4.0])
    assert (load.requests_per_second, load.output_tokens_per_second) == (2.0, 500)
    assert (load.sent_per_second, load.latest_send_ms) == (0.75, 500)
    assert math.isnan(as_load(run_of(2.0), [0.0], [0.0]).sent_per_second)


def test_serve_as_a_table() -> None:
    figures = Streaming(12.345, 20.0, 3.0, 4.0, 3.5, 9.0, 1000.0, 2000.0)
    kind = {"requests": 9, "idle": Streaming(5.0, *[6.0] * 7), "median": figures}
    load = Load(10, 2000, 0, 1000, 4.0, 250.0, 750.0, 3, 2.5, 9.5, 0.75)
    report = report_of(kinds={"short": kind, "long": kind}, median=load)
    row = "| 9 | 5.00 | 12.35 | 20.00 | 3.00 | 4.00 | 3.50 | 9.00 | 1,000.00 | 2,000.00 |"
    assert serve_table(report).splitlines() == [
        HEADLINE,
        "",
        "| prompts | requests | TTFT idle ms | TTFT ms | p99 | TPOT ms | p99 | ITL ms | p99 "
        "| E2EL ms | p99 |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
        f"| short {row}",
        f"| long {row}",
        "",
        "| requests sent/s | latest send ms | requests/s | output tokens/s | seconds "
        "| preemptions |",
        "| --- | --: | --: | --: | --: | --: |",
        "| 9.50 | 0.75 | 2.50 | 250.00 | 4.00 | 3 |",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--request-rate", "0", "'0' is no finite number above 0"),
        ("--request-rate", "inf", "'inf' is no finite number above 0"),
        ("--request-rate", "fast", "'fast' is no finite number above 0"),
        ("--long-share", "2", "'2' is no number from 0 to 1"),
        ("--long-share", "nan", "'nan' is no number from 0 to 1"),
        ("--num-requests", "0", "'0' is no number from 1 on"),
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
    assert f"{flag}: {sentence}" in capsys.readouterr().err


def test_requests_leave_though_none_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "SILENCE", 0.1)
    endpoint = f"ipc://{tmp_path}/clients"
    target = Target(endpoint, "", 8, Config(name="none"))
    with (
        contextlib.closing(Gateway(endpoint, echo)) as gateway,  # has no answer to token ids
        Meter(target, 0.0) as meter,
        pytest.raises(LaunchError, match="ended before it answered"),
    ):
        meter.run_load([Item([number], 3) for number in range(4)], [0.0, 0.01, 0.01, 0.03])
    prompts = [one.prompt for one in gateway.heard if isinstance(one, GenerateRequest)]
    assert prompts == [[0], [1], [2], [3]]


@pytest.mark.pipeline
def test_serve(
    measured: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = ("--num-requests", "8", "--request-rate", "20", "--input-tokens", "6")
    long = ("--long-input-tokens", "40", "--long-share", "0.25", "--output-tokens", "4")
    arguments = ("serve", *workload, *long, "--runs", "2", "--name", measured.name, "--json")
    report = json.loads(bench(monkeypatch, capsys, *arguments))
    assert report["workload"]["request_rate"] == 20
    assert len(report["runs"]) == 2
    for run in [*report["runs"], report["median"]]:
        assert (run["requests"], run["input_tokens"]) == (8, 6 * 6 + 2 * 40)
        assert (run["output_tokens"], run["cached_tokens"], run["preemptions"]) == (32, 0, 0)
        assert 0 < run["sent_per_second"] < 2 * 7 / arrival_times(8, 20, 0)[-1]  # none is early
        assert run["latest_send_ms"] >= 0
        assert 0 < run["requests_per_second"] < run["output_tokens_per_second"]
    assert {kind: one["requests"] for kind, one in report["kinds"].items()} == {
        "short": 6,
        "long": 2,
    }
    for one in report["kinds"].values():
        for figures in (one["idle"], *one["runs"], one["median"]):
            assert 0 < figures["ttft_ms"] <= figures["ttft_p99_ms"] < figures["e2el_p99_ms"]
            assert 0 < figures["itl_ms"] <= figures["itl_p99_ms"]
            assert 0 < figures["tpot_ms"] <= figures["tpot_p99_ms"]
