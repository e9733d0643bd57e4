"""`launch bench offline`, `latency` and `serve`: the model with the whole pipeline around it.

Requests pass gateway, tokenizer, scheduler, workers and detokenizer, like any client's requests.
One pipeline serves all runs of a command.
"""

import contextlib
import itertools
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec
from msgspec import Struct

from penstock.launch.bench.figures import (
    Figures,
    Stamps,
    hardware,
    load_figures,
    median,
    run_figures,
    stream_figures,
    versions,
)
from penstock.launch.bench.http_meter import KEY_FIELDS, HttpMeter, server_key
from penstock.launch.bench.options import (
    Item,
    LatencyOptions,
    ModelOptions,
    OfflineOptions,
    ServeOptions,
    arrival_times,
    given_lengths,
    random_kinds,
    random_lengths,
    variant,
)
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import resolve
from penstock.launch.pipeline.options import flag, given_options
from penstock.launch.pipeline.run_folder import model_name
from penstock.launch.pipeline.target import LocalClient, check_no_options, target, vocab_size
from penstock.protocol.client.session import PendingRequest
from penstock.protocol.config import Config
from penstock.protocol.messages.client import ErrorReply, GenerateReply, GenerateRequest
from penstock.protocol.messages.sampling import SAMPLER_NUMBERS
from penstock.protocol.messages.status import SchedulerStatus, StatusReply

WARM_UP_TOKENS = 16
IDLE_REQUESTS = 5  # requests of each kind, sent one after the other before the load
OWN_DEFAULTS: dict[str, Any] = {
    "http": 0,
    "enable_prefix_caching": False,
    "log_level": "warning",
}
# seconds to wait for the scheduler's report after the end; a report comes every half second
REPORT_TIMEOUT = 5.0


class Target(Struct):
    """Pipeline that receives the requests."""

    endpoint: str
    model: str
    vocab_size: int
    config: Config | None = None  # None if only endpoint and model are known
    # seconds from the start to `ready` of a pipeline started by the benchmark
    ready_seconds: float | None = None
    keys: str = ""  # folder of keys, if the gateway uses keys


@contextlib.contextmanager
def measured(arguments: Namespace) -> Iterator[Target]:
    """Yield the running pipeline `name` or `endpoint`, else a pipeline that ends with the block.

    Raises LaunchError for invalid options.
    """
    options = given_options(arguments, Config)
    endpoint, start = options.pop("endpoint"), time.perf_counter()
    if not (endpoint or "name" in options):
        with target(options, "bench", OWN_DEFAULTS) as config:
            yield _target(config, time.perf_counter() - start)
        return
    model, keys = options.pop("model", None), options.pop("curve_keys", "")
    if "name" in options:
        with target(options, "bench", {}) as config:
            yield _target(msgspec.structs.replace(config, curve_keys=keys or config.curve_keys))
        return
    check_no_options(options)
    if model is None:
        raise LaunchError("--endpoint needs --model, for the size of its vocabulary")
    fields = resolve({"model": model}, weights=False)
    found = _target(Config(endpoint=endpoint, curve_keys=keys, **fields))
    found.config = None
    yield found


def _target(config: Config, ready_seconds: float | None = None) -> Target:
    where = config.endpoint, model_name(config), vocab_size(config)
    return Target(*where, config, ready_seconds, config.curve_keys)


class Meter:
    """Client that measures a pipeline."""

    def __init__(self, pipeline: Target, options: ModelOptions) -> None:
        """Connect; requests set all sampling parameters, as the model may have other defaults."""
        name = pipeline.config.name if pipeline.config else None
        self.client = LocalClient(pipeline.endpoint, name, pipeline.keys)
        given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
        self.sampling: dict[str, Any] = {**SAMPLER_NUMBERS, **given}
        self.report = self.client.status(wait=True)  # status at the last idle moment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def gpu_idle_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the GPU's idle time between two of the last 1,024 steps."""
        return self._scheduler().gpu_idle_us

    def run(self, items: list[Item]) -> Figures:
        """Measure requests sent at the same time, without streaming."""
        start = time.perf_counter()
        return self._finish(start, [self.send(item) for item in items])

    def run_streams(self, items: list[Item]) -> Figures:
        """Measure requests sent at the same time, with a message for each token."""
        stamps = [self._stream(item) for item in items]
        self._finish(stamps[0].start, [stream.answer for stream in stamps])
        return stream_figures(stamps)

    def run_one_by_one(self, items: list[Item]) -> Figures:
        """Measure streams in turn; each request is sent after the previous stream has ended."""
        stamps = []
        for item in items:
            stamps.append(self._stream(item))
            self.client.wait_for(stamps[-1].answer, GenerateReply)
        return stream_figures(stamps)

    def run_load(
        self, items: list[Item], times: list[float], max_concurrency: int = 0
    ) -> tuple[Figures, list[Stamps]]:
        """Measure streams sent at `times`, in seconds; the first is sent at 0.

        max_concurrency: open requests, above which the next request waits; 0: unlimited.
        """
        start, stamps = time.perf_counter(), []
        open_answers: list[PendingRequest] = []
        for item, seconds in zip(items, times, strict=True):
            self.client.take_until(start + seconds)
            while max_concurrency and len(open_answers) >= max_concurrency:
                self.client.wait()
                open_answers = [answer for answer in open_answers if not answer.final]
            stamps.append(self._stream(item))
            open_answers.append(stamps[-1].answer)
        for stream in stamps:
            while not stream.answer.final:
                self.client.wait()
        failed = [stream for stream in stamps if isinstance(stream.answer.final, ErrorReply)]
        for stream in failed:
            stream.times.clear()
        run = self._finish(start, [stream.answer for stream in stamps if stream.times])
        return run | {"failed": len(failed)}, stamps

    def send(self, item: Item, *, stream: bool = False) -> PendingRequest:
        return self.client.ask(
            GenerateRequest(
                prompt=item.prompt,
                max_tokens=item.num_output_tokens,
                ignore_eos=True,
                stream=stream,
                **self.sampling,
            )
        )

    def _stream(self, item: Item) -> Stamps:
        return Stamps(time.perf_counter(), self.send(item, stream=True))

    def _finish(self, start: float, answers: list[PendingRequest]) -> Figures:
        """Wait for the answers, and until no request runs."""
        replies = [self.client.wait_for(answer, GenerateReply) for answer in answers]
        seconds, before = time.perf_counter() - start, self._scheduler()
        self.report = self._report_of_the_end()
        preemptions = self._scheduler().num_preemptions - before.num_preemptions
        return run_figures(replies, seconds, preemptions)

    def _scheduler(self) -> SchedulerStatus:
        return self.report.scheduler or SchedulerStatus(epoch=0, ready=False)

    def _report_of_the_end(self) -> StatusReply:
        """Return the first report without running requests."""
        deadline = time.monotonic() + REPORT_TIMEOUT
        while True:
            status = self.client.status(fresh=True)
            scheduler = status.scheduler
            is_over = scheduler and not scheduler.num_running + scheduler.num_waiting
            if is_over or time.monotonic() > deadline:  # other clients may use the pipeline
                return status


def bench_offline(options: OfflineOptions, arguments: Namespace) -> dict[str, Any]:
    """Measure runs in which all requests are sent at the same time."""

    def measure(meter: Meter, vocab_size: int) -> dict[str, Any]:
        items = random_lengths(
            options.num_requests, options.min_tokens, options.max_tokens, options.bench_seed
        )
        warm_up = items[: max(len(items) // 8, 1)]
        runs = _runs(meter, items, warm_up, options.runs, vocab_size)
        return {**runs, "gpu_idle_us": meter.gpu_idle_us}

    return _bench("offline", options, arguments, measure)


def bench_latency(options: LatencyOptions, arguments: Namespace) -> dict[str, Any]:
    """Measure the runs of each batch, then a run with streaming."""

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
    """Send a few requests one after the other, then run loads with the given arrival times."""
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
        warm_up = [*items[: number // 8], *itertools.chain(*few.values())]
        _warm_up(meter, warm_up, vocab_size, options.max_concurrency)
        idle = {kind: meter.run_one_by_one(variant(few[kind], -2, vocab_size)) for kind in few}
        loads = []
        for run in range(options.runs):
            run_items = variant(items, run, vocab_size)
            loads.append(meter.run_load(run_items, times, options.max_concurrency))
            _show_progress()
        runs = [load_figures(*load, times, options.goodput) for load in loads]
        figures = {kind: [stream_figures(of(kind, stamps)) for _, stamps in loads] for kind in few}
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
    """Return the report of a server that need not be Penstock."""
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
    """Return the report: facts about the pipeline, and the results of `measure`."""
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
    """Warm up, then measure the runs."""
    _warm_up(meter, warm_up, vocab_size)
    runs: list[Figures] = []
    for number in range(num_runs):
        runs.append(meter.run(variant(items, number, vocab_size)))
        _show_progress()
    return _with_median(runs)


def _with_median(runs: list[Figures]) -> dict[str, Any]:
    return {"runs": runs, "median": median(runs)}


def _warm_up(meter: Meter | HttpMeter, items: list[Item], vocab_size: int, most: int = 0) -> None:
    """Send the beginnings of requests, up to `most` at a time; 0: all."""
    short = [Item(prompt, min(number, WARM_UP_TOKENS)) for prompt, number in items]
    for begin in range(0, len(short), most or len(short)):
        meter.run(variant(short[begin:][: most or None], -1, vocab_size))


def _show_progress() -> None:
    print(".", end="", file=sys.stderr, flush=True)
