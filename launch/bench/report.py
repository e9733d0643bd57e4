"""What the benchmarks print: JSON with all facts, or a table for people."""

import contextlib
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import msgspec

from penstock.launch.bench.measure import Run
from penstock.launch.bench.overload import Figures
from penstock.launch.options import flag
from penstock.protocol.config import Config

RUN_COLUMNS = (
    "requests",
    "prompt tokens",
    "cached tokens",
    "output tokens",
    "seconds",
    "output tokens/s",
    "total tokens/s",
    "preemptions",
)
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
LOAD_COLUMNS = (
    "requests sent/s",
    "latest send ms",
    "requests/s",
    "output tokens/s",
    "seconds",
    "preemptions",
)
SERVE_COLUMNS = (
    *("requests", "TTFT idle ms", "TTFT ms", "p99", "TPOT ms", "p99"),
    *("ITL ms", "p99", "E2EL ms", "p99"),
)
OVERLOAD_COLUMNS = (
    *("requests sent/s", "latest send ms", "offered", "finished", "refused", "failed"),
    *("output tokens/s", "TTFT ms", "p99", "refusal ms", "p99", "worst", "retry after s", "most"),
)


def hardware() -> dict[str, Any]:
    """The processors that this process may use; `gpus` is empty where nvidia-smi is not."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpus: list[str] = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
        gpus = found.stdout.splitlines()
    return {"cpus": len(os.sched_getaffinity(0)), "gpus": gpus}


def versions() -> dict[str, str]:
    """Of Python and of the packages that are there."""
    found = {"python": platform.python_version()}
    for name in ("penstock", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def as_json(report: dict[str, Any]) -> str:
    """The report for programs."""
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def offline_table(report: dict[str, Any]) -> str:
    """A row for each run, and their median."""
    runs = [(str(number), run) for number, run in enumerate(report["runs"], 1)]
    rows = [[name, *_cells(run)] for name, run in [*runs, ("median", report["median"])]]
    return "\n".join([_headline(report), "", *_table(("run", *RUN_COLUMNS), rows)])


def latency_table(report: dict[str, Any]) -> str:
    """A row for each batch."""
    rows = []
    for one in report["batches"]:
        run, streaming = one["median"], one["streaming"]
        times = (streaming.ttft_ms, streaming.itl_ms, streaming.itl_p99_ms)
        speed = [f"{run.seconds:.2f}", f"{run.output_tokens_per_second:,.0f}"]
        cells = [*speed, *(f"{ms:.2f}" for ms in times), f"{run.preemptions:g}"]
        cells += [f"{us:.1f}" for us in one["gpu_idle_us"]]
        rows.append([str(one["batch"]), *cells])
    return "\n".join([_headline(report), "", *_table(("batch", *LATENCY_COLUMNS), rows)])


def serve_table(report: dict[str, Any]) -> str:
    """What the clients saw, a row for each kind of request; then the load in one row."""
    rows = []
    for kind, one in report["kinds"].items():
        times = [one["idle"].ttft_ms, *msgspec.structs.astuple(one["median"])]
        rows.append([kind, str(one["requests"]), *(f"{ms:,.2f}" for ms in times)])
    load = report["median"]
    speeds = (load.requests_per_second, load.output_tokens_per_second, load.seconds)
    cells = [f"{value:,.2f}" for value in (load.sent_per_second, load.latest_send_ms, *speeds)]
    lines = _table(("prompts", *SERVE_COLUMNS), rows)
    lines += ["", *_table(LOAD_COLUMNS, [[*cells, f"{load.preemptions:g}"]])]
    return "\n".join([_headline(report), "", *lines])


def overload_table(report: dict[str, Any]) -> str:
    """The two parts, what they come to in two sentences, and the memory of each process."""
    cores = [f"{report[name].client_cores:.2f}" for name in ("capacity", "overload")]
    rows = [[name, *_part_cells(report[name])] for name in ("capacity", "overload")]
    lines = _table(("", *OVERLOAD_COLUMNS), rows)
    lines += [
        "",
        f"Goodput is {report['goodput_share']:.1%} of the capacity, which is that of "
        f"{report['concurrency']} requests at once.",
        f"The client kept {' and '.join(cores)} of the CPU cores busy: where they are few, the "
        "pipeline lacks them; near 1.00 the client itself is what is measured.",
    ]
    memory = [
        [name, *(f"{mib:,.1f}" for mib in around)]
        for name, around in report["resident_mib"].items()
    ]
    if memory:
        lines += ["", *_table(("process", "MiB before the overload", "after"), memory)]
    return "\n".join([_headline(report), "", *lines])


def _part_cells(part: Figures) -> list[str]:
    numbers = (part.offered, part.finished, part.refused, part.failed)
    times = (
        *(part.ttft_ms, part.ttft_p99_ms),
        *(part.refusal_ms, part.refusal_p99_ms, part.refusal_worst_ms),
        *(part.retry_after_least_s, part.retry_after_most_s),
    )
    return [
        *(f"{value:,.2f}" for value in (part.sent_per_second, part.latest_send_ms)),
        *(f"{number:,}" for number in numbers),
        f"{part.output_tokens_per_second:,.0f}",
        *("-" if math.isnan(value) else f"{value:,.2f}" for value in times),
    ]


def _cells(run: Run) -> list[str]:
    return [
        f"{value:,.2f}" if field == "seconds" else f"{value:,.0f}"
        for field, value in msgspec.structs.asdict(run).items()
    ]


def _table(columns: Iterable[str], rows: list[list[str]]) -> list[str]:
    """Markdown, numbers to the right."""
    columns = list(columns)
    lines = [columns, ["---"] + ["--:"] * (len(columns) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _headline(report: dict[str, Any]) -> str:
    """What was measured, where, in which way."""
    gpus, cpus = report["hardware"]["gpus"], report["hardware"]["cpus"]
    facts = [
        f"{report['model']} on {', '.join([*gpus, f'{cpus} CPU cores'])}",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        ", ".join(f"{name} {_shown(value)}" for name, value in report["workload"].items()),
    ]
    facts += _options(report["options"])
    if "gpu_idle_us" in report:
        facts.append(
            "GPU idle between steps {:.1f} µs, p99 {:.1f} µs".format(*report["gpu_idle_us"])
        )
    if report["ready_seconds"] is not None:
        facts.append(f"ready after {report['ready_seconds']:.1f} s")
    return "; ".join(facts)


def _options(config: Config | None) -> list[str]:
    """Those that are not as usual, and whether there is a prefix cache."""
    if config is None:
        return []
    usual = Config(
        name=config.name,
        endpoint=config.endpoint,
        model=config.model,
        enable_prefix_caching=config.enable_prefix_caching,
        log_level=config.log_level,
    )
    fields = [f for f in Config.__struct_fields__ if getattr(config, f) != getattr(usual, f)]
    caching = f"prefix caching {'on' if config.enable_prefix_caching else 'off'}"
    return [*(f"{flag(field)} {getattr(config, field)}" for field in fields), caching]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
