"""`launch bench capacity`: the calculation, and what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.bench.capacity import COSTS, Capacity, Cost
from penstock.launch.commands.cli import main
from tests.launch.test_bench import bench

NOTHING = dict.fromkeys(COSTS, Cost())


def capacity(costs: dict[str, Cost] = COSTS, **options: Any) -> Capacity:
    usual = {"tp": 1, "rows": 100, "input_tokens": 50, "output_tokens": 200, "stream_share": 0.5}
    fields = {"tokens_per_gpu": 10_000.0, "utilization": 0.5} | usual | options
    return Capacity(**fields, costs=NOTHING | costs)


@pytest.mark.parametrize(
    ("cost", "cores"),
    [
        (Cost(request=100), 2 * 50 * 100e-6),
        (Cost(prompt_token=3), 2 * 50 * 50 * 3e-6),
        (Cost(message=10), 2 * 100 * 4 * 10e-6),
        (Cost(token=5), 2 * 10_000 * 5e-6),
        (Cost(streamed_token=8), 2 * 10_000 * 0.5 * 8e-6),
    ],
)
def test_what_two_gpus_cost(cost: Cost, cores: float) -> None:
    """Two GPUs give 20,000 tokens a second: 100 requests, 200 steps of four messages."""
    assert capacity().use(cost, 2, copies=4) == pytest.approx(cores)


def test_detokenizers_are_as_many_as_the_tokens_need() -> None:
    model = capacity({"detokenizer": Cost(token=100)})
    assert [model.detokenizers(gpus) for gpus in (0.1, 0.5, 0.51, 10)] == [1, 1, 2, 20]


@pytest.mark.parametrize(("gpus", "number"), [(1, 3), (3.5, 24), (4.9, 108), (6.02, 133)])
def test_every_detokenizer_up_to_the_rows_hears_of_every_step(gpus: float, number: int) -> None:
    """100 steps a GPU of 1 ms take a tenth of a core of each; one core does the tokens of one."""
    model = capacity({"detokenizer": Cost(message=1000, token=100)}, rows=100)
    limit = model.limits()["a detokenizer that hears of every step"]
    assert limit == pytest.approx(5)
    assert model.detokenizers(gpus) == number


def test_a_gateway_hears_from_each_detokenizer_at_every_step() -> None:
    model = capacity({"detokenizer": Cost(token=100), "gateway": Cost(message=10)}, rows=100)
    assert (model.detokenizers(2), model.detokenizers(60)) == (4, 120)
    assert model.gateway(2) == pytest.approx(200 * 4 * 10e-6)
    assert model.gateway(60) == pytest.approx(6000 * 100 * 10e-6)


def test_the_gateways_limit_is_where_its_share_of_a_core_is_used_up() -> None:
    model = capacity()
    limit = model.limits()["the gateway's core"]
    assert model.gateway(limit) == pytest.approx(0.5, rel=1e-3)
    assert model.point(1)["gateways"] == 1
    many = model.point(100)
    assert many["gateways"] == -(-100 // limit)
    assert many["gateway cores"] / many["gateways"] <= 0.5


def test_a_schedulers_share_is_that_of_one_replica() -> None:
    costs = {"scheduler": Cost(message=1000), "gateway": Cost(token=1)}
    shares = [capacity(costs, tp=4).point(gpus)["cores of a scheduler"] for gpus in (4, 400)]
    assert shares == pytest.approx([0.4, 0.4])


def test_the_wait_is_that_of_a_queue_with_one_server() -> None:
    """M/D/1: half as long as a message takes, where the server is half busy."""
    model = capacity({"gateway": Cost(message=50, token=49.5 / 100)}, utilization=0.9)
    at = model.point(50)
    assert at["gateway cores"] == pytest.approx(0.4975)
    assert at["wait ms"] == pytest.approx(0.0995 * 0.4975 / (2 * 0.5025))


def test_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tokens-per-gpu", "1000", "2500", "--tp", "1", "2", "--gpus", "8", "1000")
    printed = bench(monkeypatch, capsys, "capacity", *flags)
    lines = printed.splitlines()
    assert [line for line in lines if "--tp" in line] == [
        "1,000 tokens/s a GPU, --tp 1",
        "2,500 tokens/s a GPU, --tp 2",
    ]
    assert [line.split(" | ")[1] for line in lines if line.startswith("| 1,000 |")] == [
        "1,000,000",
        "2,500,000",
    ]
    assert printed.count("First to break: the gateway's core at ") == 2


def test_costs_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"gateway": {"token": 1}}')
    speed = ("--tokens-per-gpu", "1000", "--tp", "1", "--gpus", "70", "--json")
    printed = bench(monkeypatch, capsys, "capacity", *speed, "--costs", str(file))
    [one] = json.loads(printed)
    assert one["points"][0]["gateway cores"] == pytest.approx(0.07)
    assert one["limits"]["the gateway's core"] == pytest.approx(700, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "8"), "--tp has 1 numbers, --tokens-per-gpu 3"),
        (("--utilization", "1"), "got '1', expected a number between 0 and 1"),
        (("--costs", "/nowhere"), "--costs /nowhere: "),
        (("--costs", "{file}"), "unknown field `tokens`"),
    ],
)
def test_options_that_cannot_be(
    flags: tuple[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"gateway": {"tokens": 1}}')
    arguments = [flag.format(file=file) for flag in flags]
    monkeypatch.setattr("sys.argv", ["launch", "bench", "capacity", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
