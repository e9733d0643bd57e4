"""`launch chaos` without a pipeline: what it plans, and what it says of what it saw."""

from typing import Any

import psutil
import pytest

from penstock.launch.chaos.load import Content, Flight, Received
from penstock.launch.chaos.processes import KINDS, ChaosOptions, Event, Kill, make_schedule
from penstock.launch.chaos.report import Outcome, Recovery, as_table, faults, make_report
from penstock.launch.chaos.run import left_behind, shared_memory
from penstock.protocol.config import run_folder

NAMES = ["gateway.1", "tokenizer.1", "scheduler.1", "worker.1", "worker.2", "detokenizer.1"]
RIGHT = Content({"tokens": [1, 2, 3, 4], "text": "abcd"}, ["stop", None])


# ---- the schedule ---------------------------------------------------------------------------


def test_schedule_follows_from_its_seed() -> None:
    schedules = [make_schedule(NAMES, ChaosOptions(seed=seed)) for seed in (1, 1, 2)]
    assert schedules[0] == schedules[1] != schedules[2]


@pytest.mark.parametrize("kills", [1, 2, 7, 100])
def test_schedule_has_as_many_kills_as_asked_for(kills: int) -> None:
    options = ChaosOptions(kills=kills, together=0.5, during_recovery=0.5)
    events = make_schedule(NAMES, options)
    assert sum(len(event.all_kills) for event in events) == kills
    for event in events:
        processes = [kill.process for kill in event.kills]
        assert len(set(processes)) == len(processes) <= 3


def test_schedule_keeps_the_shares() -> None:
    never = make_schedule(NAMES, ChaosOptions(stop_share=0, together=0, during_recovery=0))
    assert all(len(event.all_kills) == 1 and not event.has_stop for event in never)
    assert {event.kind for event in never} == set(KINDS)
    options = ChaosOptions(stop_share=1, together=1, during_recovery=1, kills=99)
    *always, _ = make_schedule(NAMES, options)
    assert all(len(event.kills) > 1 and event.again and event.has_stop for event in always)
    assert {event.kind for event in always} == {"several"}


def test_schedule_stops_nothing_that_sends_no_heartbeats_yet() -> None:
    options = ChaosOptions(kills=200, stop_share=1, during_recovery=1, together=0)
    for event in make_schedule(NAMES, options):
        if event.again:
            again, first = event.again.process, event.kills[0].process
            is_new = again.partition(".")[0] == first.partition(".")[0]
            assert event.again.how == ("SIGKILL" if is_new else "SIGSTOP")


def test_schedule_hits_the_processes_that_there_are() -> None:
    events = make_schedule(["worker.1"], ChaosOptions(together=1, during_recovery=1))
    assert {kill.process for event in events for kill in event.all_kills} == {"worker.1"}


# ---- the report -----------------------------------------------------------------------------


def flight(event: int, token_ids: list[int], text: str) -> Flight:
    ended = Flight(0, "plain", is_stream=True)
    parts = {"tokens": token_ids, "text": text}
    ended.received = Received(True, Content(parts), Content(parts, ["stop", None]))
    ended.event = event
    return ended


def outcome(**changes: Any) -> Outcome:
    """Three events, and a request that ended after each: the second one lost a token."""
    scheduler, worker = Kill("scheduler.1", "SIGKILL"), Kill("worker.2", "SIGSTOP")
    right = [1, 2, 3, 4]
    fields: dict[str, Any] = {
        "expected": [RIGHT],
        "flights": [
            flight(0, right, "abcd"),
            flight(1, [1, 2, 4], "abd"),
            flight(2, right, "abcd"),
        ],
        "recoveries": [
            Recovery(Event(5, [scheduler]), 8, True, 1.0),
            Recovery(Event(5, [scheduler]), 4, True, 3.0),
            Recovery(Event(5, [scheduler], worker), 6, True, 5.0),
        ],
        "num_restarts": {"scheduler.1": 3, "worker.1": 1, "worker.2": 1},
        "memory": ({"worker": 2**30}, {"worker": 2**31}),
        "is_answering": True,
        "used_blocks": 0,
        "processes": [],
        "num_open": 0,
    }
    return Outcome(**fields | changes)


def report_of(
    seen: Outcome, *, is_exact: bool = True, left: tuple[str, ...] = ()
) -> dict[str, Any]:
    facts = {"left": left, "model": "Qwen3 demo", "tp": 2, "dp": 1, "options": {"seed": 7}}
    report = make_report(seen, is_exact=is_exact) | facts | {"hardware": {"gpus": [], "cpus": 2}}
    return report | {"faults": faults(report)}


def test_report_sums_by_kind() -> None:
    report = report_of(outcome())
    alone, several, every = (report["rows"][kind] for kind in ("scheduler", "several", "all"))
    assert (alone["sigkill"], alone["requests_running"], alone["median_running"]) == (2, 12, 6)
    assert (alone["tokens_lost"], alone["different"], several["tokens_lost"]) == (1, 1, 0)
    assert (alone["silence_killed"], alone["silence_stopped"]) == ((2.0, 3.0), None)
    assert (several["sigkill"], several["sigstop"]) == (1, 1)
    assert (every["requests_running"], every["silence_killed"]) == (18, (2.0, 3.0))
    assert every["silence_stopped"] == several["silence_stopped"] == (5.0, 5.0)
    assert report["restarts"] == {"scheduler": 3, "worker": 2}
    assert report["faults"] == [
        "tokens lost: 1",
        "answers that differ from the undisturbed run: 1",
    ]
    table = as_table(report)
    assert "| scheduler | 2 | 0 | 12 | 6 | 0 | 1 | 0 | 0 | 1 | 2.00 | 3.00 |  |  |" in table
    assert "| plain | 3 | 0 | 1 | 0 | 0 | 1 |" in table
    assert "| worker | 2 | 1,024 | 2,048 |" in table
    assert "seed 7" in table


def test_on_a_gpu_other_tokens_are_no_fault() -> None:
    other = outcome(flights=[flight(0, [1, 2, 3, 5], "abce")])
    assert report_of(other)["faults"] == ["answers that differ from the undisturbed run: 1"]
    on_gpu = report_of(other, is_exact=False)
    assert (on_gpu["rows"]["all"]["different"], on_gpu["faults"]) == (1, [])


def test_report_tells_of_what_is_lost_and_left() -> None:
    silent = flight(2, [1], "a")
    silent.received.reply = None
    killed = Recovery(Event(5, [Kill("gateway.1", "SIGKILL")]), 1, False, 9.0)
    left = {"is_answering": False, "used_blocks": 4, "num_open": 2}
    seen = outcome(flights=[silent], recoveries=[killed] * 3, **left)
    assert report_of(seen, left=("process 17",))["faults"] == [
        "kills not recovered from: 3",
        "requests lost (no answer): 1",
        "status requests without an answer: 1",
        "KV blocks that did not come back: 4",
        "requests still open: 2",
        "left over (process 17): 1",
    ]


def test_left_behind_finds_processes_and_folders() -> None:
    folder, here = run_folder("left-by-a-test"), psutil.Process()
    folder.mkdir(parents=True)
    try:
        left = left_behind(folder.name, [here], shared_memory())
    finally:
        folder.rmdir()
    assert left == [f"process {here.pid}", str(folder)]
    assert left_behind(folder.name, [], shared_memory()) == []
