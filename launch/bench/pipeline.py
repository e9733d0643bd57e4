"""`launch bench pipeline`: what the pipeline costs around a model that takes no time.

Requests go through gateway, tokenizer, scheduler, detokenizer and back; the worker is a stand-in
that returns tokens at once. So the figures are of this code and its sockets alone.
"""

import os
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from typing import Any

import psutil

from penstock.launch.bench.options import PipelineOptions
from penstock.launch.bench.report import table
from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.ephemeral_pipeline import private_pipeline
from penstock.protocol.client.client import Client

PROMPT = "x" * 100
STAND_IN = "python -P -m penstock.launch.bench.standin_worker"
MIN_SECONDS = 2.0
Result = dict[str, Any]
KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer", "client")


def bench_pipeline(options: PipelineOptions, _: Namespace) -> list[Result]:
    """Every batch, streaming and not, for each number of detokenizers."""
    results: list[Result] = []
    for number in options.detokenizers:
        name = f"bench-{os.getpid()}"
        flags = ("--detokenizers", str(number), "--log-level", "warning")
        with (
            private_pipeline(name, *flags, worker=STAND_IN) as endpoint,
            Client(endpoint) as client,
        ):
            _measure(client, name, 64, 100, stream=False)  # warms up
            for batch in options.batches:
                for stream in (False, True):
                    runs = [
                        _measure(client, name, batch, options.max_tokens, stream=stream)
                        for _ in range(options.runs)
                    ]
                    results.append(_median(runs, batch, stream, number))
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def _measure(client: Client, name: str, batch: int, output_tokens: int, *, stream: bool) -> Result:
    """Run `batch` requests at a time for MIN_SECONDS: CPU times come in steps of 10 ms."""
    cpu, num_tokens, start = cpu_seconds(name), 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < MIN_SECONDS:
        streams = [
            client.submit(PROMPT, max_tokens=output_tokens, ignore_eos=True, stream=stream)
            for _ in range(batch)
        ]
        num_tokens += sum(len(one.result().token_ids) for one in streams)
    used = cpu_seconds(name)
    used.subtract(cpu)
    return {
        "speed": num_tokens / seconds,
        "cpu": {kind: used[kind] * 1e6 / num_tokens for kind in KINDS},
    }


def cpu_seconds(name: str) -> Counter[str]:
    """CPU time used so far, by kind of process."""
    used: Counter[str] = Counter()
    pids = {one.pid: one.name for one in list_processes(name)}
    for pid, process in (pids | {os.getpid(): "client"}).items():
        times = psutil.Process(pid).cpu_times()
        used[process.partition(".")[0]] += times.user + times.system
    return used


def _median(runs: list[Result], batch: int, stream: bool, detokenizers: int) -> Result:
    cpu = {kind: statistics.median(run["cpu"][kind] for run in runs) for kind in KINDS}
    return {
        "batch": batch,
        "stream": stream,
        "detokenizers": detokenizers,
        "tokens_per_second": statistics.median(run["speed"] for run in runs),
        # CPU time of its process, sockets included, for one token of each request
        "scheduler_us_per_step": cpu["scheduler"] * batch,
        "cpu_us_per_token": cpu,
    }


def as_table(results: list[Result]) -> str:
    """Return the results as a markdown table."""
    titles = ("batch", "stream", "detokenizers", "tokens/s", "scheduler µs/step", *KINDS)
    rows = []
    for one in results:
        speed = f"{one['tokens_per_second']:,.0f}", f"{one['scheduler_us_per_step']:.0f}"
        costs = [f"{cost:.2f}" for cost in one["cpu_us_per_token"].values()]
        stream = "yes" if one["stream"] else "no"
        rows.append([str(one["batch"]), stream, str(one["detokenizers"]), *speed, *costs])
    return "\n".join(table(titles, rows))
