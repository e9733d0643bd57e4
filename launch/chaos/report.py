"""Report of a run of `launch chaos`: sums by kind of process, a table and a verdict."""

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

import psutil
from msgspec import Struct

from penstock.launch.bench.figures import table
from penstock.launch.chaos.load import Content, Flight, Verdict, check
from penstock.launch.chaos.processes import KINDS, SEVERAL, Event
from penstock.launch.pipeline.procfile import kind_of

BEFORE = "before the first kill"
COLUMNS = (
    *("killed", "SIGKILL", "SIGSTOP", "requests running", "median", "requests lost"),
    *("tokens lost", "doubled", "torn", "different"),
    *("silence after SIGKILL s", "worst", "after SIGSTOP s", "worst"),
)
Row = dict[str, Any]
REQUEST_COLUMNS = ("kind", "requests", "lost", "tokens lost", "doubled", "torn", "different")
MEMORY_COLUMNS = ("process", "restarts", "RSS before MiB", "RSS after MiB")


class Recovery(Struct):
    """Effect of an event on the running requests."""

    event: Event
    num_running: int
    is_over: bool  # the pipeline recovered within the timeout
    silence: float  # longest time in seconds in which a running stream received nothing


class Outcome(Struct):
    """All observations of a run."""

    expected: list[Content]
    flights: list[Flight]
    recoveries: list[Recovery]
    # by name of the process; a worker's death ends the other workers of its group
    num_restarts: dict[str, int]
    # resident bytes by kind of process, before and after the load
    memory: tuple[dict[str, int], dict[str, int]]
    is_answering: bool  # whether the pipeline answers after the load
    used_blocks: int  # KV blocks in use after the load, minus blocks in use before
    processes: list[psutil.Process]  # all processes seen during the run
    num_open: int  # requests open in the gateway or the scheduler after the load


def make_report(outcome: Outcome, *, is_exact: bool) -> dict[str, Any]:
    """Return all figures; is_exact: the tokens of a request do not depend on its batches."""
    kinds = [recovery.event.kind for recovery in outcome.recoveries]
    judged: dict[str, list[Verdict]] = {}
    by_request: dict[str, list[Verdict]] = {}
    for flight in outcome.flights:
        kind = kinds[flight.event] if flight.event >= 0 else BEFORE
        verdict = check(flight.received, outcome.expected[flight.number])
        judged.setdefault(kind, []).append(verdict)
        by_request.setdefault(flight.kind, []).append(verdict)
    rows = {
        kind: make_row(
            [recovery for recovery in outcome.recoveries if recovery.event.kind == kind],
            judged.get(kind, []),
        )
        for kind in (*KINDS, SEVERAL)
        if kind in kinds
    }
    everything = [verdict for verdicts in judged.values() for verdict in verdicts]
    restarts: Counter[str] = Counter()
    for process, number in outcome.num_restarts.items():
        restarts[kind_of(process)] += number
    return {
        "rows": {**rows, "all": make_row(outcome.recoveries, everything)},
        "by_request": {
            kind: {"requests": len(verdicts), **_sums(verdicts)}
            for kind, verdicts in by_request.items()
        },
        "requests": len(outcome.flights),
        "aborted": sum(flight.received.is_aborted for flight in outcome.flights),
        "is_exact": is_exact,
        "losses": sorted({verdict.lost for verdict in everything if verdict.lost}),
        "restarts": restarts,
        "memory_before": outcome.memory[0],
        "memory_after": outcome.memory[1],
        "is_answering": outcome.is_answering,
        "used_blocks": outcome.used_blocks,
        "open_requests": outcome.num_open,
    }


def make_row(recoveries: list[Recovery], verdicts: list[Verdict]) -> Row:
    """Return the sums over events that killed one kind of process.

    A fault counts for the last event before the request's end. silence_killed, silence_stopped:
    median and maximum over events, in seconds, of the longest time in which a stream received
    nothing.
    """
    signals = Counter(kill.how for recovery in recoveries for kill in recovery.event.all_kills)
    running = [recovery.num_running for recovery in recoveries]
    return {
        "sigkill": signals["SIGKILL"],
        "sigstop": signals["SIGSTOP"],
        "requests_running": sum(running),
        "median_running": statistics.median(running or [0]),
        **_sums(verdicts),
        "silence_killed": _silence(
            recovery for recovery in recoveries if not recovery.event.has_stop
        ),
        "silence_stopped": _silence(recovery for recovery in recoveries if recovery.event.has_stop),
        "not_recovered": sum(not recovery.is_over for recovery in recoveries),
    }


def _sums(verdicts: list[Verdict]) -> Row:
    """Return the number of each kind of fault."""
    return {
        "requests_lost": sum(bool(verdict.lost) for verdict in verdicts),
        "tokens_lost": sum(verdict.tokens_lost for verdict in verdicts),
        "tokens_doubled": sum(verdict.tokens_doubled for verdict in verdicts),
        "torn": sum(verdict.is_torn for verdict in verdicts),
        "different": sum(verdict.is_different for verdict in verdicts),
    }


def _silence(recoveries: Iterable[Recovery]) -> tuple[float, float] | None:
    seconds = [recovery.silence for recovery in recoveries]
    return (statistics.median(seconds), max(seconds)) if seconds else None


def faults(report: dict[str, Any]) -> list[str]:
    """Return the faults, with a sentence for each."""
    row: Row = report["rows"]["all"]
    found = {
        "kills not recovered from": row["not_recovered"],
        f"requests lost ({'; '.join(report['losses'])})": row["requests_lost"],
        "tokens lost": row["tokens_lost"],
        "tokens doubled": row["tokens_doubled"],
        "streams that differ from their own reply": row["torn"],
        "answers that differ from the undisturbed run": row["different"] * report["is_exact"],
        "status requests without an answer": int(not report["is_answering"]),
        "KV blocks that did not come back": max(report["used_blocks"], 0),
        "requests still open": report["open_requests"],
        f"left over ({', '.join(report['left'])})": len(report["left"]),
    }
    return [f"{text}: {number}" for text, number in found.items() if number]


def as_table(report: dict[str, Any]) -> str:
    """Return a table for people: facts, a row for each kind of killed process, and memory."""
    rows = [[name, *_cells(row)] for name, row in report["rows"].items()]
    memory = [
        [kind, str(report["restarts"].get(kind, 0))]
        + [
            f"{report[when].get(kind, 0) / 2**20:,.0f}"
            for when in ("memory_before", "memory_after")
        ]
        for kind in KINDS
    ]
    requests = [
        [kind, *map(str, sums.values())] for kind, sums in sorted(report["by_request"].items())
    ]
    gpus, cpus = report["hardware"]["gpus"], report["hardware"]["cpus"]
    options = ", ".join(f"{name} {value}" for name, value in report["options"].items())
    facts = [
        f"{report['model']} (tp {report['tp']}, dp {report['dp']}) on "
        f"{', '.join([*gpus, f'{cpus} CPU cores'])}",
        f"{report['requests']} requests, {report['aborted']} of them aborted",
        options,
    ]
    return "\n".join(
        [
            "; ".join(facts),
            "",
            *table(COLUMNS, rows),
            "",
            *table(REQUEST_COLUMNS, requests),
            "",
            *table(MEMORY_COLUMNS, memory),
            "",
            *(report["faults"] or ["nothing lost, nothing doubled, nothing left"]),
        ]
    )


def _cells(row: Row) -> list[str]:
    numbers = list(row.values())[: len(COLUMNS) - 5]
    pairs = [row[name] or (None, None) for name in ("silence_killed", "silence_stopped")]
    seconds = ["" if value is None else f"{value:.2f}" for pair in pairs for value in pair]
    return [*(f"{number:g}" for number in numbers), *seconds]
