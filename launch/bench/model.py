"""`launch bench offline` and `latency`: the model behind the whole pipeline.

Requests go through gateway, tokenizer, scheduler, workers and detokenizer, as any client's do. One
pipeline serves all runs of a command.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from penstock.launch.bench.measure import Meter, Run, Streaming, median
from penstock.launch.bench.report import hardware, versions
from penstock.launch.bench.target import target
from penstock.launch.bench.workload import Item, fixed_lengths, random_lengths, variant

WARM_UP_TOKENS = 16
WORKLOADS = {
    "offline": ("num_requests", "min_tokens", "max_tokens", "bench_seed", "temperature"),
    "latency": ("batches", "input_tokens", "output_tokens", "bench_seed", "temperature"),
}


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


def _bench(
    subject: str, arguments: Namespace, measure: Callable[[Meter, int], dict[str, Any]]
) -> dict[str, Any]:
    """The whole report: facts, and what `measure` gives."""
    with target(arguments) as pipeline, Meter(pipeline, arguments.temperature) as meter:
        results = measure(meter, pipeline.vocab_size)
        print(file=sys.stderr)
        return {
            "subject": subject,
            "model": pipeline.model,
            "hardware": hardware(),
            "versions": versions(),
            "workload": {name: getattr(arguments, name) for name in WORKLOADS[subject]},
            "options": pipeline.config,
            "ready_seconds": pipeline.ready_seconds,
            **results,
        }


def _runs(
    meter: Meter, items: list[Item], warm_up: list[Item], num_runs: int, vocab_size: int
) -> dict[str, Any]:
    """Warms up, then measures."""
    short = [Item(prompt, min(number, WARM_UP_TOKENS)) for prompt, number in warm_up]
    meter.run(variant(short, -1, vocab_size))
    runs: list[Run] = []
    for number in range(num_runs):
        runs.append(meter.run(variant(items, number, vocab_size)))
        _show_progress()
    return {"runs": runs, "median": median(runs)}


def _show_progress() -> None:
    print(".", end="", file=sys.stderr, flush=True)
