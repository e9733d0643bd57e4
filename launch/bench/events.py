"""`launch bench events`: the cost of server-sent events, from the scheduler to an HTTP client.

A stand-in worker has steps of a given length; each step gives each stream a token. The client
reads sockets and counts the ends of events: it parses nothing, so it costs little.
"""

import select
import socket
import statistics
import sys
import time
from argparse import Namespace
from typing import Any

import httpx
from msgspec import json

from penstock.launch.bench.options import EventsOptions
from penstock.launch.bench.pipeline import STAND_IN, median_costs
from penstock.launch.bench.report import table
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.target import free_port, private_pipeline

Result = dict[str, Any]
KINDS = ("http", "gateway", "detokenizer", "scheduler", "worker", "client")
EVENT_END, LAST_CHUNK = b"\n\n", b"0\r\n\r\n"
CONNECT_RETRIES = 7  # of httpx, which waits twice as long before each: half a minute in all
READ_BYTES = 1 << 18


def bench_events(options: EventsOptions, _: Namespace) -> list[Result]:
    """Measure each step length; 0 is a worker that never waits."""
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
            EventClient(port, options.streams, options.max_tokens).run()  # warms up
            client = EventClient(port, options.streams, options.max_tokens)
            costs = median_costs(config.name, client.run, options.runs)
            speed, cpu = costs["tokens_per_second"], costs["cpu_us_per_token"]
            figures = {
                "step_ms": step_ms,
                "streams": options.streams,
                "events_per_second": speed * client.num_events / client.num_tokens,
                "ttft_ms": statistics.median(client.ttft) * 1e3,
                "cores": speed * sum(cpu[kind] for kind in KINDS) / 1e6,
            }
            results.append(figures | costs)
    print(file=sys.stderr)
    return results


class EventClient:
    """Streams of completions on connections that are kept."""

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
        self._num_tokens = num_streams * max_tokens  # of a run
        self.num_events = self.num_tokens = 0  # of all runs
        self.ttft: list[float] = []  # seconds to the first event of each stream
        self._poll = select.epoll()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_streams)]
        self._by_fd = {one.fileno(): one for one in self._sockets}
        for file in self._by_fd:
            self._poll.register(file, select.EPOLLIN)
        self._buffer = bytearray(READ_BYTES)

    def run(self) -> int:
        """Send a request on each connection, and read all answers; return the tokens of a run."""
        first: dict[int, float] = {}
        tails = dict.fromkeys(self._by_fd, b"")
        start = time.perf_counter()
        for one in self._sockets:
            one.sendall(self._request)
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
                tails[file] = bytes(data[-len(LAST_CHUNK) + 1 :])  # what ends there may be cut
                if data.endswith(LAST_CHUNK):
                    del tails[file]
        self.num_tokens += self._num_tokens
        self.ttft += first.values()
        return self._num_tokens


def wait_for_http(port: int) -> None:
    """Return when a server listens; the pipeline may be ready before. Raises httpx.ConnectError."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=CONNECT_RETRIES)) as http:
        http.get(f"http://127.0.0.1:{port}/health").raise_for_status()


def as_table(results: list[Result]) -> str:
    """Return the results as a markdown table."""
    titles = ("step ms", "streams", "events/s", "tokens/s", "TTFT ms", "cores", *KINDS)
    rows = []
    for one in results:
        speeds = (f"{one[name]:,.0f}" for name in ("events_per_second", "tokens_per_second"))
        costs = [f"{one['cpu_us_per_token'][kind]:.2f}" for kind in KINDS]
        times = f"{one['ttft_ms']:.1f}", f"{one['cores']:.2f}"
        rows.append([f"{one['step_ms']:g}", str(one["streams"]), *speeds, *times, *costs])
    return "\n".join(table(titles, rows))
