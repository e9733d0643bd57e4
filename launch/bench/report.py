"""Output of the benchmarks: JSON with all facts, or a table for people."""

import contextlib
import math
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from penstock.launch.bench.figures import Figures
from penstock.launch.commands.gpus import physical_gpus
from penstock.launch.pipeline.options import flag
from penstock.protocol.config import DISTRIBUTION, Config
from penstock.protocol.processors import num_processors

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
# options that are in the headline by other words, or do not matter
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


def hardware() -> dict[str, Any]:
    """Return the number of processors that this process may use, and the GPUs of the machine."""
    return {"cpus": num_processors(), "gpus": [one.name for one in physical_gpus() or ()]}


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    found = {"python": platform.python_version()}
    for name, distribution in (("penstock", DISTRIBUTION), ("torch", "torch")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(distribution)
    return found


def offline_table(report: dict[str, Any]) -> str:
    """Return a row for each run, and their median."""
    runs = [(str(number), run) for number, run in enumerate(report["runs"], 1)]
    rows = [[name, *_cells(run)] for name, run in [*runs, ("median", report["median"])]]
    return "\n".join([_headline(report), "", *table(("run", *RUN_COLUMNS.values()), rows)])


def latency_table(report: dict[str, Any]) -> str:
    """Return a row for each batch."""
    rows = []
    for one in report["batches"]:
        run, streaming = one["median"], one["streaming"]
        times = [streaming[name] for name in ("median_ttft_ms", "median_itl_ms", "p99_itl_ms")]
        speed = [f"{run['duration']:.2f}", f"{run['output_throughput']:,.0f}"]
        cells = [*speed, *(f"{ms:.2f}" for ms in times), f"{run['preemptions']:g}"]
        cells += [f"{us:.1f}" for us in one["gpu_idle_us"]]
        rows.append([str(one["batch"]), *cells])
    return "\n".join([_headline(report), "", *table(("batch", *LATENCY_COLUMNS), rows)])


def serve_table(report: dict[str, Any]) -> str:
    """Return the latencies, a row for each kind of request, and the load in one row."""
    rows = []
    for kind, one in report["kinds"].items():
        idle = f"{one['idle']['median_ttft_ms']:,.2f}"
        rows.append([kind, str(one["requests"]), idle, *_times(one["median"])])
    tables = [*table(("prompts", *SERVE_COLUMNS), rows), ""]
    tables += table(LOAD_COLUMNS, [_load_cells(report)])
    return "\n".join([_headline(report), "", *tables])


def _times(figures: Figures) -> list[str]:
    """Median and 99th percentile of each."""
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
    """Return a markdown table, numbers to the right."""
    columns = list(columns)
    lines = [columns, ["---"] + ["--:"] * (len(columns) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _headline(report: dict[str, Any]) -> str:
    """Return the model, hardware, versions, workload and options in one line."""
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
    shown = [field for field in Config.__struct_fields__ if field not in NOT_SHOWN]
    fields = [field for field in shown if getattr(config, field) != getattr(Config(), field)]
    caching = f"prefix caching {'on' if config.enable_prefix_caching else 'off'}"
    return [*(f"{flag(field)} {getattr(config, field)}" for field in fields), caching]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}:{its:g}" for name, its in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
