"""`launch top`: a live view of the pipeline, updated at each report of the scheduler."""

import asyncio
import contextlib
import itertools
import os
import sys
import termios
import time
import tty
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.launch.pipeline.options import add_name, name_of
from penstock.launch.pipeline.run_folder import model_name, running_config
from penstock.launch.supervisor.output import at_node
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import Config
from penstock.protocol.messages.status import (
    Histogram,
    Metrics,
    ModelStatus,
    SchedulerStatus,
    StatusReply,
)

# seconds without a report, after which the view says that the gateway does not answer
SILENCE = 2.0
NUM_KEPT = 60  # reports kept for percentiles, one each half second
SHARES = (0.5, 0.9, 0.99)
TIMES = {
    "TTFT": "time_to_first_token_seconds",
    "ITL": "inter_token_latency_seconds",
    "E2EL": "e2e_request_latency_seconds",
}


class Report(NamedTuple):
    """Status of the gateway at one moment."""

    moment: float
    status: StatusReply


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch top`."""
    command.set_defaults(run=_run)
    command.add_argument(
        "--once", action="store_true", help="print the table once and exit, as without a terminal"
    )
    add_name(command)


def _run(arguments: Namespace) -> int:
    config = running_config(name_of(arguments))
    with contextlib.suppress(asyncio.CancelledError):  # raised by `q`
        is_live = sys.stdout.isatty() and not arguments.once
        asyncio.run(_show(config) if is_live else _print(config))
    return 0


async def _print(config: Config) -> None:
    """Print two reports: rates are between them, percentiles since the gateway's start."""
    async with AsyncClient(config.endpoint, keys=config.curve_keys) as client:
        before, now = await _report(client), await _report(client)
    Console().print(view(config, before, now, None))


async def _show(config: Config) -> None:
    reports: deque[Report] = deque(maxlen=NUM_KEPT)
    async with AsyncClient(config.endpoint, keys=config.curve_keys) as client:
        with _keyboard(), Live(screen=True, auto_refresh=False) as live:
            while True:
                task = asyncio.ensure_future(_report(client))
                while not (await asyncio.wait([task], timeout=SILENCE))[0]:
                    live.update(Text(f"{config.name}: the gateway does not answer"), refresh=True)
                reports.append(task.result())
                before = reports[-2] if len(reports) > 1 else reports[0]
                live.update(view(config, before, reports[-1], reports[0]), refresh=True)


async def _report(client: AsyncClient) -> Report:
    status = await client.status(fresh=True, metrics=True)
    return Report(time.monotonic(), status)


@contextlib.contextmanager
def _keyboard() -> Iterator[None]:
    """Cancel the task on `q` while the context is open."""
    task = asyncio.current_task()
    if task is None or not sys.stdin.isatty():
        yield
        return
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, lambda: b"q" in os.read(keyboard, 64) and task.cancel())
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def view(config: Config, before: Report, now: Report, oldest: Report | None) -> Group:
    """Return all tables; oldest: start of the percentiles; None: a single view since the start."""
    state = "ready" if now.status.ready else "not ready"
    head = f"{config.name}: {state}, {model_name(config)} on {config.endpoint}"
    if oldest:  # the view is live
        head += "; q quits" if sys.stdin.isatty() else "; Ctrl-C quits"
    since = f"last {now.moment - oldest.moment:.0f} s" if oldest else "since the start"
    times = [
        _times(new.metrics, old.metrics if old else None, f"{new.name}, {since}" if more else since)
        for new, old, more in _models(now, oldest)
    ]
    return Group(head, _queues(before, now), *times, _processes(before, now))


def _models(now: Report, old: Report | None) -> list[tuple[ModelStatus, ModelStatus | None, bool]]:
    """Return each model now and before, and whether there are several models."""
    models = now.status.by_model
    before = old.status.by_model if old else [None] * len(models)
    return [(model, its, len(models) > 1) for model, its in zip(models, before, strict=True)]


def _queues(before: Report, now: Report) -> Table:
    seconds = now.moment - before.moment
    table = Table("requests", "waiting", "running", "KV in use", "prefill tok/s", "decode tok/s")
    for model, earlier, has_more in _models(now, before):
        cells = _cells(model.scheduler) if model.scheduler else ["-", "-", "-"]
        rates = ["-", "-"]
        if (new := model.metrics) and (old := earlier and earlier.metrics) and seconds:
            grown = (
                new.prompt_tokens - old.prompt_tokens,
                new.generation_tokens - old.generation_tokens,
            )
            rates = [f"{max(tokens, 0) / seconds:,.0f}" for tokens in grown]
        name = f"{model.name}: " * has_more
        table.add_row(f"{name}{model.num_requests}", *cells, *rates)
        for scheduler in model.schedulers if len(model.schedulers) > 1 else []:
            table.add_row(f"{name}replica {scheduler.replica}", *_cells(scheduler))
    return table


def _cells(scheduler: SchedulerStatus) -> list[str]:
    return [str(scheduler.num_waiting), str(scheduler.num_running), f"{scheduler.kv_usage:.0%}"]


def _times(metrics: Metrics | None, old: Metrics | None, since: str) -> Table:
    table = Table(f"ms, {since}", *(f"p{share * 100:g}" for share in SHARES))
    for title, name in TIMES.items():
        histogram = getattr(metrics, name, None)
        cells = ["-" for _ in SHARES]
        if histogram:
            counts = _grown(histogram, getattr(old, name, None))
            cells = [quantile(histogram.bounds, counts, share) for share in SHARES]
        table.add_row(title, *cells)
    return table


def _grown(histogram: Histogram, old: Histogram | None) -> list[int]:
    """Return the counts since `old`, or all counts if the gateway was restarted."""
    if old is None or sum(old.counts) > sum(histogram.counts):
        return histogram.counts
    return [new - before for new, before in zip(histogram.counts, old.counts, strict=True)]


def quantile(bounds: list[float], counts: list[int], share: float) -> str:
    """Return milliseconds like Prometheus's histogram_quantile: linear within an interval."""
    rank, edges = share * sum(counts), [0.0, *bounds]
    below = list(itertools.accumulate(counts, initial=0))
    for place, number in enumerate(counts[:-1]):
        if number and below[place + 1] >= rank:
            part = (rank - below[place]) / number
            return f"{(edges[place] + part * (edges[place + 1] - edges[place])) * 1e3:,.1f}"
    return f"> {bounds[-1] * 1e3:,.0f}" if counts[-1] else "-"


def _processes(before: Report, now: Report) -> Table:
    table = Table("process", "pid", "uptime", "restarts", "CPU", "MiB")
    seconds = now.moment - before.moment
    old = {(process.name, process.pid): process.cpu_seconds for process in before.status.processes}
    for process in now.status.processes:
        used = process.cpu_seconds - old.get((process.name, process.pid), process.cpu_seconds)
        cpu = f"{used / seconds:.0%}" if seconds else "-"
        cells = (
            str(process.pid),
            str(timedelta(seconds=int(process.uptime))),
            str(process.restarts),
            cpu,
        )
        table.add_row(
            at_node(process.name, process.node), *cells, f"{process.rss_bytes / 2**20:,.0f}"
        )
    return table
