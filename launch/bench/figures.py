"""Figures of benchmarks with vLLM's names, and their output as JSON or as tables."""

import contextlib
import math
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from penstock.launch.commands.gpus import physical_gpus
from penstock.launch.pipeline.options import flag
from penstock.protocol.client.session import PendingRequest
from penstock.protocol.config import DISTRIBUTION, OPTIONS, Config
from penstock.protocol.messages.client import GenerateReply, Usage
from penstock.protocol.processors import num_processors

Figures = dict[str, float]
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
RUN_COLUMNS = {
    "completed": "requests",
    "failed": "failed",
    "total_input_tokens": "prompt tokens",
    "cached_tokens": "cached tokens",
    "total_output_tokens": "output tokens",
    "duration": "seconds",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "total tokens/s",
    "preemptions": "preemptions",
}
LATENCY_COLUMNS = (
    "seconds",
    "output tokens/s",
    "TTFT ms",
    "ITL ms",
    "ITL p99 ms",
    "preemptions",
    "GPU idle µs",
    "p99",
)
LOAD_FIELDS = (
    *("sent_per_second", "latest_send_ms", "request_throughput", "request_goodput"),
    *("output_throughput", "duration"),
)
LOAD_COLUMNS = (
    *("requests sent/s", "latest send ms", "requests/s", "good ones/s", "output tokens/s"),
    *("seconds", "completed", "failed", "preemptions"),
)
# options that the headline shows differently, or that do not matter
NOT_SHOWN = {
    *(
        "name",
        "endpoint",
        "http",
        "http_port",
        "model",
        "served_model_name",
        "enable_prefix_caching",
        "log_level",
    )
}
TIMES = ("ttft", "tpot", "itl", "e2el")
SERVE_COLUMNS = (
    *("requests", "TTFT idle ms", "TTFT ms", "p99", "TPOT ms", "p99"),
    *("ITL ms", "p99", "E2EL ms", "p99"),
)


class Stamps:
    """Arrival times of the messages with tokens of a stream that was sent at `start`."""

    def __init__(self, start: float, answer: PendingRequest | None = None) -> None:
        """Start at `start`; answer: a client's answer to record; otherwise callers use `add`."""
        self.start = start
        self.times: list[float] = []
        self.num_tokens = 0
        if answer:
            self.answer = answer
            answer.on_change = self._stamp
            self._stamp()  # messages that arrived while the request was sent

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def tpot(self) -> float:
        """Seconds per output token, without the first token; NaN for a single token."""
        if self.num_tokens < 2:
            return math.nan
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.start

    def is_good(self, limits: Mapping[str, float]) -> bool:
        """Return whether the request met the limits, which are milliseconds by property name."""
        return not any(getattr(self, name) * 1e3 > limit for name, limit in limits.items())

    def add(self, num_tokens: int) -> None:
        """Record a message with tokens that arrives now."""
        self.times.append(time.perf_counter())
        self.num_tokens += num_tokens

    def _stamp(self) -> None:
        while delta := self.answer.take_delta():
            if delta.token_ids:
                self.add(len(delta.token_ids))


def run_figures(replies: Sequence[GenerateReply], seconds: float, preemptions: int) -> Figures:
    """Return the figures of a run; seconds: from sending the first request to the last answer."""
    usages = [reply.usage for reply in replies]
    return usage_figures(usages, seconds) | {"preemptions": preemptions}


def usage_figures(usages: Sequence[Usage], seconds: float) -> Figures:
    """Return the figures of a run that every server reports, from the usage of its answers."""
    num_inputs = sum(usage.prompt_tokens for usage in usages)
    num_outputs = sum(usage.output_tokens for usage in usages)
    return {
        "completed": len(usages),
        "failed": 0,
        "total_input_tokens": num_inputs,
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "total_output_tokens": num_outputs,
        "duration": seconds,
        "request_throughput": len(usages) / seconds,
        "output_throughput": num_outputs / seconds,
        "total_token_throughput": (num_inputs + num_outputs) / seconds,
    }


def stream_figures(all_stamps: Sequence[Stamps]) -> Figures:
    """Return latencies in milliseconds of ended requests, except failures without a token.

    A figure is NaN if outputs of one token don't have it. ITL is the time between two messages of a
    stream, over all requests.
    """
    stamps = [stream for stream in all_stamps if stream.times]
    seconds = {
        "ttft": [stream.ttft for stream in stamps],
        "tpot": [stream.tpot for stream in stamps if stream.num_tokens > 1],
        "itl": [
            b - a for stream in stamps for a, b in zip(stream.times, stream.times[1:], strict=False)
        ],
        "e2el": [stream.e2el for stream in stamps],
    }
    figures: Figures = {}
    for name, values in seconds.items():
        figures[f"mean_{name}_ms"] = statistics.fmean(values) * 1e3 if values else math.nan
        for title, share in PERCENTILES.items():
            figures[f"{title}_{name}_ms"] = percentile(values, share) * 1e3
    return figures


def load_figures(
    run: Figures, stamps: Sequence[Stamps], times: Sequence[float], goodput: Mapping[str, float]
) -> Figures:
    """Return the figures of a run of `launch bench serve`.

    stamps: in the order of `times`, the times when requests should be sent. goodput: limits of a
    good request in milliseconds.
    """
    num_good = sum(bool(stream.times) and stream.is_good(goodput) for stream in stamps)
    return {
        **run,
        **arrivals([stream.start for stream in stamps], times),
        "request_goodput": num_good / run["duration"] if goodput else math.nan,
        **stream_figures(stamps),
    }


def arrivals(starts: Sequence[float], times: Sequence[float]) -> Figures:
    """Return the achieved rate (NaN for one request) and the largest delay of a request.

    The delay shows whether the client is too slow.
    """
    sent = [start - starts[0] for start in starts]
    late = max(s - t for s, t in zip(sent, times, strict=True))
    rate = (len(sent) - 1) / sent[-1] if len(sent) > 1 else math.nan
    return {"sent_per_second": rate, "latest_send_ms": late * 1e3}


def median(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    first = runs[0]
    return {n: type(first[n])(statistics.median(run[n] for run in runs)) for n in first}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that a `share` of the values don't exceed; NaN if empty."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def hardware() -> dict[str, Any]:
    """Return the number of processors available to this process, and the machine's GPUs."""
    return {"cpus": num_processors(), "gpus": [gpu.name for gpu in physical_gpus() or ()]}


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    found = {"python": platform.python_version()}
    for name, distribution in (("penstock", DISTRIBUTION), ("torch", "torch")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(distribution)
    return found


def offline_table(report: dict[str, Any]) -> str:
    """Return a table with a row for each run, and the median of the runs."""
    runs = [(str(number), run) for number, run in enumerate(report["runs"], 1)]
    rows = [[name, *_cells(run)] for name, run in [*runs, ("median", report["median"])]]
    return "\n".join([_headline(report), "", *table(("run", *RUN_COLUMNS.values()), rows)])


def latency_table(report: dict[str, Any]) -> str:
    """Return a table with a row for each batch."""
    rows = []
    for result in report["batches"]:
        run, streaming = result["median"], result["streaming"]
        times = [streaming[name] for name in ("median_ttft_ms", "median_itl_ms", "p99_itl_ms")]
        speed = [f"{run['duration']:.2f}", f"{run['output_throughput']:,.0f}"]
        cells = [*speed, *(f"{ms:.2f}" for ms in times), f"{run['preemptions']:g}"]
        cells += [f"{us:.1f}" for us in result["gpu_idle_us"]]
        rows.append([str(result["batch"]), *cells])
    return "\n".join([_headline(report), "", *table(("batch", *LATENCY_COLUMNS), rows)])


def serve_table(report: dict[str, Any]) -> str:
    """Return the latencies, with a row for each kind of request, and the load in a single row."""
    rows = []
    for kind, result in report["kinds"].items():
        idle = f"{result['idle']['median_ttft_ms']:,.2f}"
        rows.append([kind, str(result["requests"]), idle, *_times(result["median"])])
    tables = [*table(("prompts", *SERVE_COLUMNS), rows), ""]
    tables += table(LOAD_COLUMNS, [_load_cells(report)])
    return "\n".join([_headline(report), "", *tables])


def _times(figures: Figures) -> list[str]:
    """Return the median and the 99th percentile of each latency."""
    names = [f"{p}_{name}_ms" for name in TIMES for p in ("median", "p99")]
    return [f"{figures[name]:,.2f}" for name in names]


def _load_cells(load: dict[str, Any]) -> list[str]:
    speeds = ["-" if math.isnan(load[name]) else f"{load[name]:,.2f}" for name in LOAD_FIELDS]
    return [*speeds, *(f"{load[name]:g}" for name in ("completed", "failed", "preemptions"))]


def _cells(run: Figures) -> list[str]:
    return [
        f"{value:,.2f}" if field in ("duration", "request_throughput") else f"{value:,.0f}"
        for field, value in run.items()
    ]


def table(columns: Iterable[str], rows: list[list[str]]) -> list[str]:
    """Return a markdown table with right-aligned numbers."""
    columns = list(columns)
    lines = [columns, ["---"] + ["--:"] * (len(columns) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _headline(report: dict[str, Any]) -> str:
    """Return a line with the model, hardware, versions, workload and options."""
    gpus, cpus = report["hardware"]["gpus"], report["hardware"]["cpus"]
    where = ", ".join([*gpus, f"{cpus} CPU cores"])
    if url := report.get("base_url"):
        where = f"{url}, measured from {where}"
    facts = [
        f"{report['model']} on {where}",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        ", ".join(f"{name} {_shown(its)}" for name, its in report["workload"].items() if its != {}),
    ]
    facts += _options(report.get("options"))
    if "gpu_idle_us" in report:
        facts.append(
            "GPU idle between steps {:.1f} µs, p99 {:.1f} µs".format(*report["gpu_idle_us"])
        )
    if report.get("ready_seconds") is not None:
        facts.append(f"ready after {report['ready_seconds']:.1f} s")
    return "; ".join(facts)


def _options(config: Config | None) -> list[str]:
    """Return the options that differ from their defaults, and the state of the prefix cache."""
    if config is None:
        return []
    shown = [field for field in OPTIONS if field not in NOT_SHOWN]
    fields = [field for field in shown if getattr(config, field) != getattr(Config(), field)]
    caching = f"prefix caching {'on' if config.enable_prefix_caching else 'off'}"
    return [*(f"{flag(field)} {getattr(config, field)}" for field in fields), caching]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}:{its:g}" for name, its in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
