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
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from penstock.launch.bench.figures import median
from penstock.launch.bench.options import PipelineOptions
from penstock.launch.bench.report import table
from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.target import private_pipeline
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
        own = {"detokenizers": number, "log_level": "warning"}
        with (
            private_pipeline("bench", own, worker=STAND_IN) as config,
            Client(config.endpoint) as client,
        ):
            _run(client, 64, 100, stream=False)  # warms up
            for batch in options.batches:
                for stream in (False, True):
                    run = partial(_run, client, batch, options.max_tokens, stream=stream)
                    costs = median_costs(config.name, run, options.runs)
                    one = {"batch": batch, "stream": stream, "detokenizers": number, **costs}
                    # CPU time of its process, sockets included, for one token of each request
                    one["scheduler_us_per_step"] = costs["cpu_us_per_token"]["scheduler"] * batch
                    results.append(one)
    print(file=sys.stderr)
    return results


def _run(client: Client, batch: int, output_tokens: int, *, stream: bool) -> int:
    """Run `batch` requests, and return the number of tokens."""
    streams = [
        client.submit(PROMPT, max_tokens=output_tokens, ignore_eos=True, stream=stream)
        for _ in range(batch)
    ]
    return sum(len(one.result().token_ids) for one in streams)


def median_costs(name: str, run: Callable[[], int], num_runs: int) -> Result:
    """Call `run`, which returns a number of tokens, for MIN_SECONDS a time; return the medians.

    CPU times come in steps of 10 ms.
    """
    speeds, costs = [], []
    for _ in range(num_runs):
        cpu, num_tokens, start = cpu_seconds(name), 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < MIN_SECONDS:
            num_tokens += run()
        used = cpu_seconds(name)
        used.subtract(cpu)
        speeds.append(num_tokens / seconds)
        costs.append({kind: its * 1e6 / num_tokens for kind, its in used.items()})
        print(".", end="", file=sys.stderr, flush=True)
    return {"tokens_per_second": statistics.median(speeds), "cpu_us_per_token": median(costs)}


def cpu_seconds(name: str) -> Counter[str]:
    """CPU time used so far, by kind of process."""
    used: Counter[str] = Counter()
    pids = {one.pid: one.name for one in list_processes(name)}
    for pid, process in (pids | {os.getpid(): "client"}).items():
        times = psutil.Process(pid).cpu_times()
        used[process.partition(".")[0]] += times.user + times.system
    return used


def as_table(results: list[Result]) -> str:
    """Return the results as a markdown table."""
    titles = ("batch", "stream", "detokenizers", "tokens/s", "scheduler µs/step", *KINDS)
    rows = []
    for one in results:
        speed = f"{one['tokens_per_second']:,.0f}", f"{one['scheduler_us_per_step']:.0f}"
        costs = [f"{one['cpu_us_per_token'][kind]:.2f}" for kind in KINDS]
        stream = "yes" if one["stream"] else "no"
        rows.append([str(one["batch"]), stream, str(one["detokenizers"]), *speed, *costs])
    return "\n".join(table(titles, rows))
