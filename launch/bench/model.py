"""`launch bench offline`, `latency` and `serve`: the model with the whole pipeline around it.

Requests go through gateway, tokenizer, scheduler, workers and detokenizer, as any client's do. One
pipeline serves all runs of a command.
"""

import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.launch.bench.figures import Figures, load_figures, median, stream_figures
from penstock.launch.bench.http_meter import KEY_FIELDS, HttpMeter, server_key
from penstock.launch.bench.measure import Meter
from penstock.launch.bench.options import (
    LatencyOptions,
    ModelOptions,
    OfflineOptions,
    ServeOptions,
)
from penstock.launch.bench.report import hardware, versions
from penstock.launch.bench.target import measured
from penstock.launch.bench.workload import (
    Item,
    arrival_times,
    given_lengths,
    random_kinds,
    random_lengths,
    variant,
)
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import flag, given_options
from penstock.protocol.config import Config

WARM_UP_TOKENS = 16
IDLE_REQUESTS = 5  # of each kind, sent one by one before the load


def bench_offline(options: OfflineOptions, arguments: Namespace) -> dict[str, Any]:
    """Measure runs in which all requests are sent at once."""

    def measure(meter: Meter, vocab_size: int) -> dict[str, Any]:
        items = random_lengths(
            options.num_requests, options.min_tokens, options.max_tokens, options.bench_seed
        )
        warm_up = items[: max(len(items) // 8, 1)]
        runs = _runs(meter, items, warm_up, options.runs, vocab_size)
        return {**runs, "gpu_idle_us": meter.gpu_idle_us}

    return _bench("offline", options, arguments, measure)


def bench_latency(options: LatencyOptions, arguments: Namespace) -> dict[str, Any]:
    """Measure the runs of each batch, and then one of streams."""

    def measure(meter: Meter, vocab_size: int) -> dict[str, Any]:
        return {"batches": [one_batch(meter, vocab_size, batch) for batch in options.batches]}

    def one_batch(meter: Meter, vocab_size: int, batch: int) -> dict[str, Any]:
        lengths, seed = [options.input_tokens] * batch, options.bench_seed + batch
        items = given_lengths(lengths, options.output_tokens, seed)
        result = _runs(meter, items, items, options.runs, vocab_size)
        streaming = meter.run_streams(variant(items, options.runs, vocab_size))
        _show_progress()
        return {"batch": batch, **result, "streaming": streaming, "gpu_idle_us": meter.gpu_idle_us}

    return _bench("latency", options, arguments, measure)


def bench_serve(options: ServeOptions, arguments: Namespace) -> dict[str, Any]:
    """Send a few requests one by one; then the runs, in which each is sent at its time."""
    number, seed = options.num_requests, options.bench_seed
    lengths = {"short": options.input_tokens, "long": options.long_input_tokens}
    kinds = random_kinds(number, options.long_share, seed)
    items = given_lengths([lengths[kind] for kind in kinds], options.output_tokens, seed)
    if options.max_concurrency and "request_rate" not in arguments:
        options.request_rate = math.inf
    times = arrival_times(number, options.request_rate, seed)

    def of(kind: str, values: list[Any]) -> list[Any]:
        return [value for value, its in zip(values, kinds, strict=True) if its == kind]

    def measure(meter: Meter | HttpMeter, vocab_size: int) -> dict[str, Any]:
        few = {kind: of(kind, items)[:IDLE_REQUESTS] for kind in lengths if kind in kinds}
        _warm_up(meter, [*items[: number // 8], *itertools.chain(*few.values())], vocab_size)
        idle = {kind: meter.run_one_by_one(variant(few[kind], -2, vocab_size)) for kind in few}
        loads = []
        for run in range(options.runs):
            run_items = variant(items, run, vocab_size)
            loads.append(meter.run_load(run_items, times, options.max_concurrency))
            _show_progress()
        runs = [load_figures(*load, times, options.goodput) for load in loads]
        figures = {kind: [stream_figures(of(kind, one)) for _, one in loads] for kind in few}
        return {
            **median(runs),
            "runs": runs,
            "kinds": {
                kind: {"requests": len(of(kind, kinds)), "idle": idle[kind], **_with_median(runs)}
                for kind, runs in figures.items()
            },
            **({"gpu_idle_us": meter.gpu_idle_us} if isinstance(meter, Meter) else {}),
        }

    if arguments.base_url:
        return _bench_url(options, arguments, measure)
    return _bench("serve", options, arguments, measure)


def _bench_url(
    options: ServeOptions, arguments: Namespace, measure: Callable[[HttpMeter, int], dict[str, Any]]
) -> dict[str, Any]:
    """Return the report of a server that may be of another kind."""
    given = given_options(arguments, Config)
    key = server_key(given)
    model = given.pop("model", "")
    others = [field for field in given if field not in KEY_FIELDS and given[field] is not None]
    if others:
        raise LaunchError(f"{flag(others[0])}: got it with --base-url, expected one of them")
    with HttpMeter(arguments.base_url, key, model, options) as meter:
        results = measure(meter, meter.vocab_size)
        print(file=sys.stderr)
        return {
            "subject": "serve",
            "model": meter.model,
            "base_url": arguments.base_url,
            **_facts(options),
            **results,
        }


def _bench(
    subject: str,
    options: ModelOptions,
    arguments: Namespace,
    measure: Callable[[Meter, int], dict[str, Any]],
) -> dict[str, Any]:
    """Return the report: facts, and the results of `measure`."""
    with measured(arguments) as pipeline, Meter(pipeline, options) as meter:
        results = measure(meter, pipeline.vocab_size)
        print(file=sys.stderr)
        return {
            "subject": subject,
            "model": pipeline.model,
            **_facts(options),
            "options": pipeline.config,
            "ready_seconds": pipeline.ready_seconds,
            **results,
        }


def _facts(options: ModelOptions) -> dict[str, Any]:
    workload = {k: v for k, v in msgspec.structs.asdict(options).items() if k != "runs"}
    return {"hardware": hardware(), "versions": versions(), "workload": workload}


def _runs(
    meter: Meter, items: list[Item], warm_up: list[Item], num_runs: int, vocab_size: int
) -> dict[str, Any]:
    """Warm up, then measure."""
    _warm_up(meter, warm_up, vocab_size)
    runs: list[Figures] = []
    for number in range(num_runs):
        runs.append(meter.run(variant(items, number, vocab_size)))
        _show_progress()
    return _with_median(runs)


def _with_median(runs: list[Figures]) -> dict[str, Any]:
    return {"runs": runs, "median": median(runs)}


def _warm_up(meter: Meter | HttpMeter, items: list[Item], vocab_size: int) -> None:
    short = [Item(prompt, min(number, WARM_UP_TOKENS)) for prompt, number in items]
    meter.run(variant(short, -1, vocab_size))


def _show_progress() -> None:
    print(".", end="", file=sys.stderr, flush=True)
