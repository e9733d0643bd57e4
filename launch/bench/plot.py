"""`launch bench plot`: throughput against latency, a point for each measured load."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.launch.errors import LaunchError

FIGURES = {"ttft": "time to the first token, ms", "itl": "time between tokens, ms"}


class Point(NamedTuple):
    """One load."""

    series: str
    label: str
    throughput: float
    """output tokens a second"""
    figures: dict[str, Any]
    """those of `Streaming`"""


def plot(files: list[Path], output: Path) -> None:
    """Draws what `launch bench serve` and `latency` wrote with `--json`. Raises LaunchError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LaunchError("a plot needs matplotlib: pip install 'penstock[plot]'") from None
    series: defaultdict[str, list[Point]] = defaultdict(list)
    for file in files:
        for point in points(file):
            series[point.series].append(point)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, 2), FIGURES.items(), strict=True):
        for number, (label, found) in enumerate(series.items()):
            found.sort(key=lambda one: one.throughput)
            x = [one.throughput for one in found]
            for share, style in (("median", "o-"), ("p99", "^:")):
                y = [one.figures[f"{share}_{name}_ms"] or 0 for one in found]
                axes.plot(x, y, style, color=f"C{number}", label=f"{label}, {share}")
            for one in found:
                at = (one.throughput, one.figures[f"median_{name}_ms"] or 0)
                axes.annotate(one.label, at, (3, 4), textcoords="offset points", fontsize=8)
        axes.set(xlabel="output tokens a second", ylabel=title, ylim=(0, None), xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise LaunchError(f"--output {output}: {error}") from error


def points(file: Path) -> Iterator[Point]:
    """The loads of one result. Raises LaunchError for a file of something else."""
    try:
        report = msgspec.json.decode(file.read_bytes())
        subject, model = report["subject"], report["model"]
        if subject == "serve":
            rate = f"{report['workload']['request_rate']:g}/s"
            yield Point(model, rate, report["output_throughput"], report)
            if http := report.get("http"):
                yield Point(f"{model}, HTTP", rate, http["output_throughput"], http)
        elif subject == "latency":
            for one in report["batches"]:
                speed = one["median"]["output_throughput"]
                yield Point(f"{model}, batches", str(one["batch"]), speed, one["streaming"])
        else:
            raise LaunchError(f"{file} is of `launch bench {subject}`, which has no latencies")
    except OSError as error:
        raise LaunchError(f"{file}: {error.strerror}") from error
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise LaunchError(f"{file} is no result of `launch bench serve` or `latency`") from error
