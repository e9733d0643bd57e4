"""`launch bench pipeline` and `events`: the cost of the pipeline without the model.

In `events`, a stand-in worker has steps of a given length; each step gives each stream a token. The
client reads sockets and counts the ends of events. It parses nothing, so its cost is small.
"""

import os
import select
import socket
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import psutil
from msgspec import json

from penstock.launch.bench.figures import median, table
from penstock.launch.bench.options import EventsOptions, PipelineOptions
from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.target import free_port, private_pipeline
from penstock.protocol.client.client import Client

PROMPT = "x" * 100
STAND_IN = "python -P -m penstock.launch.bench.standin_worker"
MIN_SECONDS = 2.0
Result = dict[str, Any]
KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer", "client")
KINDS_WITH_HTTP = ("http", "gateway", "detokenizer", "scheduler", "worker", "client")
EVENT_END, LAST_CHUNK = b"\n\n", b"0\r\n\r\n"
CONNECT_RETRIES = 7  # retries of httpx, which doubles the delay each time: half a minute in total
READ_BYTES = 1 << 18


def bench_pipeline(options: PipelineOptions, _: Namespace) -> list[Result]:
    """Measure every batch with and without streaming, for each number of detokenizers."""
    results: list[Result] = []
    for number in options.detokenizers:
        own = {"detokenizers": number, "log_level": "warning"}
        with (
            private_pipeline("bench", own, worker=STAND_IN) as config,
            Client(config.endpoint) as client,
        ):
            _run(client, 64, 100, stream=False)  # warm-up
            for batch in options.batches:
                for stream in (False, True):
                    run = partial(_run, client, batch, options.max_tokens, stream=stream)
                    costs = median_costs(config.name, run, options.runs)
                    result = {"batch": batch, "stream": stream, "detokenizers": number, **costs}
                    # CPU time of the process, including sockets, per token of each request
                    result["scheduler_us_per_step"] = costs["cpu_us_per_token"]["scheduler"] * batch
                    results.append(result)
    print(file=sys.stderr)
    return results


def _run(client: Client, batch: int, output_tokens: int, *, stream: bool) -> int:
    """Run `batch` requests and return the number of tokens."""
    streams = [
        client.submit(PROMPT, max_tokens=output_tokens, ignore_eos=True, stream=stream)
        for _ in range(batch)
    ]
    return sum(len(stream.result().token_ids) for stream in streams)


def median_costs(name: str, run: Callable[[], int], num_runs: int) -> Result:
    """Return the medians of measurements, each of which calls `run` for MIN_SECONDS.

    run: returns a number of tokens. CPU times come in steps of 10 ms.
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
    """Return the CPU time used so far, by kind of process."""
    used: Counter[str] = Counter()
    pids = {process.pid: process.name for process in list_processes(name)}
    for pid, process_name in (pids | {os.getpid(): "client"}).items():
        times = psutil.Process(pid).cpu_times()
        used[process_name.partition(".")[0]] += times.user + times.system
    return used


def pipeline_table(results: list[Result]) -> str:
    """Return the results as a markdown table."""
    titles = ("batch", "stream", "detokenizers", "tokens/s", "scheduler µs/step", *KINDS)
    rows = []
    for result in results:
        speed = f"{result['tokens_per_second']:,.0f}", f"{result['scheduler_us_per_step']:.0f}"
        costs = [f"{result['cpu_us_per_token'][kind]:.2f}" for kind in KINDS]
        stream = "yes" if result["stream"] else "no"
        rows.append([str(result["batch"]), stream, str(result["detokenizers"]), *speed, *costs])
    return "\n".join(table(titles, rows))


def bench_events(options: EventsOptions, _: Namespace) -> list[Result]:
    """Measure each step length; with 0, the worker never waits."""
    results = []
    for step_ms in options.step_ms:
        port = free_port()
        own = {
            "http": options.http,
            "http_port": port,
            "log_level": "warning",
            "detokenizers": options.detokenizers,
            "max_num_seqs": options.streams,
        }
        with private_pipeline("bench", own, worker=f"{STAND_IN} {step_ms}") as config:
            wait_for_http(port)
            EventClient(port, options.streams, options.max_tokens).run()  # warm-up
            client = EventClient(port, options.streams, options.max_tokens)
            costs = median_costs(config.name, client.run, options.runs)
            speed, cpu = costs["tokens_per_second"], costs["cpu_us_per_token"]
            figures = {
                "step_ms": step_ms,
                "streams": options.streams,
                "events_per_second": speed * client.num_events / client.num_tokens,
                "ttft_ms": statistics.median(client.ttft) * 1e3,
                "cores": speed * sum(cpu[kind] for kind in KINDS_WITH_HTTP) / 1e6,
            }
            results.append(figures | costs)
    print(file=sys.stderr)
    return results


class EventClient:
    """Streams of completions on persistent connections."""

    def __init__(self, port: int, num_streams: int, max_tokens: int) -> None:
        body = json.encode(
            {
                "prompt": "x" * 100,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
        self._request = b"%b\r\ncontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body)
        self._num_tokens = num_streams * max_tokens  # tokens per run
        self.num_events = self.num_tokens = 0  # totals of all runs
        self.ttft: list[float] = []  # seconds until the first event of each stream
        self._poll = select.epoll()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_streams)]
        self._by_fd = {stream.fileno(): stream for stream in self._sockets}
        for file in self._by_fd:
            self._poll.register(file, select.EPOLLIN)
        self._buffer = bytearray(READ_BYTES)

    def run(self) -> int:
        """Send a request on each connection and read all answers; return the tokens of a run."""
        first: dict[int, float] = {}
        tails = dict.fromkeys(self._by_fd, b"")
        start = time.perf_counter()
        for stream in self._sockets:
            stream.sendall(self._request)
        while tails:
            for file, _ in self._poll.poll():
                size = self._by_fd[file].recv_into(self._buffer)
                if not size:
                    raise LaunchError("the server closed a stream")
                data = tails[file] + self._buffer[:size]
                num_new = data.count(EVENT_END) - tails[file].count(EVENT_END)
                if num_new and file not in first:
                    first[file] = time.perf_counter() - start
                self.num_events += num_new
                tails[file] = bytes(data[-len(LAST_CHUNK) + 1 :])  # an end marker may be cut here
                if data.endswith(LAST_CHUNK):
                    del tails[file]
        self.num_tokens += self._num_tokens
        self.ttft += first.values()
        return self._num_tokens


def wait_for_http(port: int) -> None:
    """Wait until a server listens, which may be after the pipeline is ready.

    Raises httpx.ConnectError.
    """
    with httpx.Client(transport=httpx.HTTPTransport(retries=CONNECT_RETRIES)) as http:
        http.get(f"http://127.0.0.1:{port}/health").raise_for_status()


def events_table(results: list[Result]) -> str:
    """Return the results as a markdown table."""
    titles = ("step ms", "streams", "events/s", "tokens/s", "TTFT ms", "cores", *KINDS_WITH_HTTP)
    rows = []
    for result in results:
        speeds = (f"{result[name]:,.0f}" for name in ("events_per_second", "tokens_per_second"))
        costs = [f"{result['cpu_us_per_token'][kind]:.2f}" for kind in KINDS_WITH_HTTP]
        times = f"{result['ttft_ms']:.1f}", f"{result['cores']:.2f}"
        rows.append([f"{result['step_ms']:g}", str(result["streams"]), *speeds, *times, *costs])
    return "\n".join(table(titles, rows))
