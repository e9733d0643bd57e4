"""`launch bench overload`: what it offers, what is made of the answers, and a small run."""

import contextlib
import itertools
import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.launch.bench.measure import Meter
from penstock.launch.bench.overload import (
    NUM_PROMPTS,
    STREAM_EVERY,
    Outcome,
    Part,
    as_figures,
    endless_prompts,
    measure_overload,
    most_at_once,
)
from penstock.launch.bench.report import overload_table
from penstock.launch.bench.target import Target
from penstock.launch.bench.workload import Item
from penstock.launch.commands.cli import main
from penstock.launch.errors import LaunchError
from penstock.protocol.config import Config
from penstock.protocol.messages.client import ErrorReply, GenerateRequest, Reply, Request
from tests.launch.fake_gateway import Gateway, delta, echo, reply
from tests.launch.test_bench import HEADLINE, bench, report_of

ITEM = Item([1, 2], 7)


@pytest.fixture
def meter_of(tmp_path: Path) -> Iterator[Callable[..., Meter]]:
    """A meter whose gateway answers each request with what the test says."""
    with contextlib.ExitStack() as stack:

        def make(answer: Callable[[GenerateRequest], list[Reply]]) -> Meter:
            def behave(request: Request) -> list[Reply]:
                return answer(request) if isinstance(request, GenerateRequest) else echo(request)

            endpoint = f"ipc://{tmp_path}/clients"
            stack.enter_context(contextlib.closing(Gateway(endpoint, behave)))
            return stack.enter_context(Meter(Target(endpoint, "", 8), 0.0))

        yield make


def refusal(code: str = "overloaded", retry_after: float | None = None) -> ErrorReply:
    return ErrorReply(code=code, message="no", retry_after=retry_after)  # type: ignore[arg-type]


def test_prompts_differ_from_the_first_token_on() -> None:
    items = list(itertools.islice(endless_prompts(5, 4, 0, 264), 3 * NUM_PROMPTS))
    assert {len(item.prompt) for item in items} == {5}
    assert {item.num_output_tokens for item in items} == set(range(1, 8))
    assert max(token for item in items for token in item.prompt) < 264
    assert len({tuple(item.prompt) for item in items}) == len(items)
    assert len({item.prompt[0] for item in items}) == len(items)
    again, other = (list(itertools.islice(endless_prompts(5, 4, n, 264), 9)) for n in (0, 1))
    assert items[:9] == again != other


def test_the_figures_of_a_part() -> None:
    outcomes = [
        Outcome(10.0, 10.5, 10.75, 100),  # before the batch is full
        Outcome(10.0, math.nan, 12.0, 20),
        Outcome(11.0, 12.5, 20.0, 16),
        Outcome(12.0, 12.25, 20.5, 100),  # after the last request was sent
        Outcome(13.0, end=13.25, code="overloaded", retry_after=2.0),
        Outcome(13.0, end=13.75, code="overloaded", retry_after=0.5),
        Outcome(13.0, end=13.5, code="overloaded"),
        Outcome(13.0, end=14.0, code="failed"),
    ]
    figures = as_figures(outcomes, 10.0, 20.0, 0.25, 0.75)
    assert (figures.seconds, figures.sent_per_second, figures.latest_send_ms) == (10, 0.7, 250)
    counts = figures.offered, figures.finished, figures.refused, figures.failed
    assert counts == (8, 4, 3, 1)
    assert figures.output_tokens_per_second == 4
    assert (figures.ttft_ms, figures.ttft_p99_ms) == (500, 1500)
    told = figures.refusal_ms, figures.refusal_p99_ms, figures.refusal_worst_ms
    assert told == (500, 750, 750)
    assert (figures.retry_after_least_s, figures.retry_after_most_s) == (0.5, 2)
    assert figures.client_cores == 0.75


def test_an_open_loop_tells_answers_and_refusals_apart(meter_of: Callable[..., Meter]) -> None:
    """Streams have a first token, all others none."""
    replies = itertools.cycle([None, refusal(retry_after=1.5), None, refusal("failed")])

    def answer(request: GenerateRequest) -> list[Reply]:
        if error := next(replies):
            return [error]
        return [delta(request, 0, 3), reply(request)] if request.stream else [reply(request)]

    part = Part(meter_of(answer), itertools.repeat(ITEM))
    part.run_open_loop([number / 1000 for number in range(2 * STREAM_EVERY)])
    figures = part.finish()
    counts = figures.offered, figures.finished, figures.refused, figures.failed
    assert counts == (16, 8, 4, 4)
    assert sorted(one.num_tokens for one in part.outcomes) == [0] * 8 + [7] * 8
    assert sum(not math.isnan(one.first) for one in part.outcomes) == 2
    assert figures.retry_after_least_s == figures.retry_after_most_s == 1.5
    assert figures.refusal_ms > 0
    assert figures.latest_send_ms >= 0


def test_a_closed_loop_sends_another_for_each_that_ends(meter_of: Callable[..., Meter]) -> None:
    open_at_each: list[int] = []

    def items() -> Iterator[Item]:
        while True:
            open_at_each.append(part.num_open)
            yield ITEM

    part = Part(meter_of(lambda request: [reply(request)]), items())
    part.run_closed_loop(3, 0.05)
    assert max(open_at_each) == 3
    assert part.num_sent > 3
    assert part.finish().finished == part.num_sent


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda _: [refusal()], "were refused while the capacity was measured with 2 at once"),
        (lambda request: [reply(request, "")], "no request ended in"),
    ],
)
def test_a_capacity_that_cannot_be_measured(
    meter_of: Callable[..., Meter],
    answer: Callable[[GenerateRequest], list[Reply]],
    sentence: str,
) -> None:
    arguments = Namespace(capacity_seconds=0.02)
    with pytest.raises(LaunchError, match=sentence):
        measure_overload(meter_of(answer), itertools.repeat(ITEM), 2, arguments)


def test_as_many_at_once_as_the_pipeline_takes() -> None:
    assert most_at_once(Config(max_num_seqs=8)) == 16
    assert most_at_once(Config(max_num_seqs=8, max_waiting_requests=3)) == 11
    with pytest.raises(LaunchError, match="--endpoint needs --concurrency"):
        most_at_once(None)


def test_overload_as_a_table() -> None:
    outcomes = [Outcome(1.0, 1.5, 3.0, 1800), Outcome(2.0, end=2.25, code="overloaded")]
    capacity = as_figures(outcomes[:1] * 3, 1.0, 5.0, 0.0, 0.25)
    overload = as_figures(outcomes, 1.0, 5.0, 0.001, 0.5)
    overload.retry_after_least_s, overload.retry_after_most_s = 1.0, 4.0
    report = report_of(
        capacity=capacity,
        overload=overload,
        concurrency=16,
        goodput_share=0.3333,
        resident_mib={"gateway.1": [30.04, 1031.0]},
    )
    assert overload_table(report).splitlines() == [
        HEADLINE,
        "",
        "|  | requests sent/s | latest send ms | offered | finished | refused | failed "
        "| output tokens/s | TTFT ms | p99 | refusal ms | p99 | worst | retry after s | most |",
        f"| --- {'| --: ' * 14}|",
        "| capacity | 0.50 | 0.00 | 3 | 3 | 0 | 0 | 1,500 | 500.00 | 500.00 | - | - | - | - | - |",
        "| overload | 0.25 | 1.00 | 2 | 1 | 1 | 0 | 500 | 500.00 | 500.00 "
        "| 250.00 | 250.00 | 250.00 | 1.00 | 4.00 |",
        "",
        "Goodput is 33.3% of the capacity, which is that of 16 requests at once.",
        "The client kept 0.25 and 0.50 of the CPU cores busy: where they are few, the pipeline "
        "lacks them; near 1.00 the client itself is what is measured.",
        "",
        "| process | MiB before the overload | after |",
        "| --- | --: | --: |",
        "| gateway.1 | 30.0 | 1,031.0 |",
    ]
    report["resident_mib"] = {}
    assert overload_table(report).endswith("is what is measured.")


@pytest.mark.parametrize("flag", ["--factor", "--seconds", "--capacity-seconds"])
def test_options_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    monkeypatch.setattr("sys.argv", ["launch", "bench", "overload", flag, "0"])
    with pytest.raises(SystemExit):
        main()
    assert f"{flag}: got '0', expected a finite number above 0" in capsys.readouterr().err


@pytest.mark.pipeline
def test_overload(
    measured: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--factor", "8", "--seconds", "1", "--capacity-seconds", "1")
    sizes = ("--input-tokens", "4", "--output-tokens", "8")
    arguments = ("overload", *load, *sizes, "--name", measured.name, "--json")
    report = json.loads(bench(monkeypatch, capsys, *arguments))
    assert (report["subject"], report["concurrency"]) == ("overload", 12)
    assert report["workload"]["factor"] == 8
    capacity, overload = report["capacity"], report["overload"]
    assert (capacity["refused"], capacity["failed"], overload["failed"]) == (0, 0, 0)
    assert capacity["finished"] == capacity["offered"] > 12
    assert overload["finished"] + overload["refused"] == overload["offered"]
    assert overload["refused"] > 0 < overload["finished"]
    assert 0 < overload["refusal_ms"] <= overload["refusal_p99_ms"] <= overload["refusal_worst_ms"]
    assert 0 < overload["ttft_ms"] <= overload["ttft_p99_ms"]
    speeds = [one["output_tokens_per_second"] for one in (overload, capacity)]
    assert report["goodput_share"] == pytest.approx(speeds[0] / speeds[1])
    assert set(report["resident_mib"]) == {
        *("launch", "gateway.1", "tokenizer.1", "scheduler.1", "worker.1", "detokenizer.1")
    }
    for before, after in report["resident_mib"].values():
        assert before > 10 < after
