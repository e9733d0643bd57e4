"""`launch bench offline`, `latency` and `serve`: the model with the whole pipeline around it.

Requests go through gateway, tokenizer, scheduler, workers and detokenizer, as any client's do. One
pipeline serves all runs of a command.
"""

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from penstock.launch.bench.measure import Figures, Meter, Run, median
from penstock.launch.bench.report import hardware, versions
from penstock.launch.bench.serving import summary
from penstock.launch.bench.streams import Streaming, as_streaming
from penstock.launch.bench.target import measured
from penstock.launch.bench.workload import (
    Item,
    arrival_times,
    fixed_lengths,
    given_lengths,
    random_kinds,
    random_lengths,
    variant,
)

WARM_UP_TOKENS = 16
SAMPLING = ("bench_seed", "temperature", "top_k", "top_p")
WORKLOADS = {
    "offline": ("num_requests", "min_tokens", "max_tokens"),
    "latency": ("batches", "input_tokens", "output_tokens"),
    "serve": (
        *("num_requests", "request_rate", "input_tokens", "long_input_tokens", "long_share"),
        *("output_tokens", "goodput"),
    ),
}
IDLE_REQUESTS = 5
"""of each kind, sent one by one before the load"""


def bench_offline(arguments: Namespace) -> dict[str, Any]:
    """Every run sends all requests at once."""

    def measure(meter: Meter, vocab_size: int) -> dict[str, Any]:
        items = random_lengths(
            arguments.num_requests, arguments.min_tokens, arguments.max_tokens, arguments.bench_seed
        )
        warm_up = items[: max(len(items) // 8, 1)]
        runs = _runs(meter, items, warm_up, arguments.runs, vocab_size)
        return {**runs, "gpu_idle_us": meter.gpu_idle_us}

    return _bench("offline", arguments, measure)


def bench_latency(arguments: Namespace) -> dict[str, Any]:
    """For each batch the runs, and then one of streams."""

    def measure(meter: Meter, vocab_size: int) -> dict[str, Any]:
        return {"batches": [one_batch(meter, vocab_size, batch) for batch in arguments.batches]}

    def one_batch(meter: Meter, vocab_size: int, batch: int) -> dict[str, Any]:
        items = fixed_lengths(
            batch, arguments.input_tokens, arguments.output_tokens, arguments.bench_seed + batch
        )
        result = _runs(meter, items, items, arguments.runs, vocab_size)
        streaming: Streaming = meter.run_streams(variant(items, arguments.runs, vocab_size))
        _show_progress()
        return {"batch": batch, **result, "streaming": streaming, "gpu_idle_us": meter.gpu_idle_us}

    return _bench("latency", arguments, measure)


def bench_serve(arguments: Namespace) -> dict[str, Any]:
    """Send a few requests one by one; then the runs, in which each is sent at its time."""
    number, seed = arguments.num_requests, arguments.bench_seed
    lengths = {"short": arguments.input_tokens, "long": arguments.long_input_tokens}
    kinds = random_kinds(number, arguments.long_share, seed)
    items = given_lengths([lengths[kind] for kind in kinds], arguments.output_tokens, seed)
    times = arrival_times(number, arguments.request_rate, seed)

    def of(kind: str, values: list[Any]) -> list[Any]:
        return [value for value, its in zip(values, kinds, strict=True) if its == kind]

    def measure(meter: Meter, vocab_size: int) -> dict[str, Any]:
        few = {kind: of(kind, items)[:IDLE_REQUESTS] for kind in lengths if kind in kinds}
        _warm_up(meter, [*items[: number // 8], *itertools.chain(*few.values())], vocab_size)
        idle = {kind: meter.run_one_by_one(variant(few[kind], -2, vocab_size)) for kind in few}
        loads = []
        for run in range(arguments.runs):
            loads.append(meter.run_load(variant(items, run, vocab_size), times))
            _show_progress()
        figures = {kind: [as_streaming(of(kind, one)) for _, one in loads] for kind in few}
        return {
            **summary(loads, times, arguments.goodput),
            "kinds": {
                kind: {"requests": len(of(kind, kinds)), "idle": idle[kind], **_with_median(runs)}
                for kind, runs in figures.items()
            },
            "gpu_idle_us": meter.gpu_idle_us,
        }

    return _bench("serve", arguments, measure)


def _bench(
    subject: str, arguments: Namespace, measure: Callable[[Meter, int], dict[str, Any]]
) -> dict[str, Any]:
    """Return the report: facts, and the results of `measure`."""
    drawn = arguments.temperature, arguments.top_k, arguments.top_p
    with measured(arguments) as pipeline, Meter(pipeline, *drawn) as meter:
        results = measure(meter, pipeline.vocab_size)
        print(file=sys.stderr)
        return {
            "subject": subject,
            "model": pipeline.model,
            "hardware": hardware(),
            "versions": versions(),
            "workload": {
                name: getattr(arguments, name) for name in (*WORKLOADS[subject], *SAMPLING)
            },
            "options": pipeline.config,
            "ready_seconds": pipeline.ready_seconds,
            **results,
        }


def _runs(
    meter: Meter, items: list[Item], warm_up: list[Item], num_runs: int, vocab_size: int
) -> dict[str, Any]:
    """Warms up, then measures."""
    _warm_up(meter, warm_up, vocab_size)
    runs: list[Run] = []
    for number in range(num_runs):
        runs.append(meter.run(variant(items, number, vocab_size)))
        _show_progress()
    return _with_median(runs)


def _with_median(runs: list[Figures]) -> dict[str, Any]:
    return {"runs": runs, "median": median(runs)}


def _warm_up(meter: Meter, items: list[Item], vocab_size: int) -> None:
    short = [Item(prompt, min(number, WARM_UP_TOKENS)) for prompt, number in items]
    meter.run(variant(short, -1, vocab_size))


def _show_progress() -> None:
    print(".", end="", file=sys.stderr, flush=True)
