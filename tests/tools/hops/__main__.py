"""Time that a request takes in each process until its client has the first token.

    python -m tests.tools.hops                     # over ZeroMQ, with a worker that has no model
    python -m tests.tools.hops --http --rest 50    # a chat over HTTP, after 50 ms of rest
    python -m tests.tools.hops --model work/0.6B   # with a model

Prints medians in µs. A pipeline of real processes streams one request at a time; the step of a
worker without a model takes 2 ms. Every process stamps the frames that it sends and receives
(`stamps/sitecustomize.py`). A request is followed from its end: from each message to the newest one
that can have caused it.
"""

import argparse
import contextlib
import http.client
import json
import os
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from penstock.launch.bench.figures import table
from penstock.launch.bench.pipeline import STAND_IN, wait_for_http
from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.target import free_port, private_pipeline
from penstock.protocol.client.client import Client
from tests.tools.hops.stamps import sitecustomize

STAMPS = Path(sitecustomize.__file__).parent
NUM_WARM_UP = 50
NUM_TOKENS = 4
"""of an answer: the first one is not the last, so that a plan follows it"""
STEP_MS = 3
"""of the worker without a model; its first one takes 2 ms, as that of a short prompt on a GPU"""
WAY = [
    ("gateway", b"TokenizeRequest"),
    ("tokenizer", b"TokenizedRequest"),
    ("scheduler", b"plan"),
    ("worker", b"sampled"),
    ("scheduler", b"StepTokens"),
    ("detokenizer", b"TextDeltas"),
]
"""processes inside of the pipeline, and the type of the message that each of them sends"""
OVER_ZMQ = [("client", b"generate"), *WAY, ("gateway", b"delta"), ("client", b"")]
OVER_HTTP = [("http", b"generate"), *WAY, ("gateway", b"replies"), ("http", b"")]
Request = Callable[[int], tuple[int, int]]
"""sends a request; returns when that was, and when its first token came"""


class Stamp(NamedTuple):
    """A frame that a process has sent or received."""

    time: int
    returned: int
    """when the call returned that sent the frame"""
    cpu: int
    is_sent: bool
    head: bytes


class Part(NamedTuple):
    """Times of one process in ns: until it received a message, until it sent its own, and CPU."""

    wait: int
    work: int
    cpu: int


class Processes:
    """Stamps of all processes, by kind, in the order of time: threads write them in another one."""

    def __init__(self, stamps: dict[str, list[Stamp]], way: list[tuple[str, bytes]]) -> None:
        self._stamps = {process: sorted(of_one) for process, of_one in stamps.items()}
        self._way = way

    def follow(self, begin: int, end: int) -> list[Part]:
        """Return the parts of a request. Raises LookupError."""
        output = Stamp(end, end, 0, True, b"")
        parts = []
        for (sender, message), (receiver, _) in reversed(list(pairwise(self._way))):
            received = self._newest(receiver, output.time, False, message)
            sent = self._newest(sender, received.time, True, message)
            cpu = output.cpu - received.cpu if output.cpu else 0
            parts.append(Part(received.time - sent.returned, output.returned - received.time, cpu))
            output = sent
        if output.time < begin:
            raise LookupError("the messages are of an earlier request")
        return [Part(0, output.returned - begin, 0), *reversed(parts)]

    def _newest(self, process: str, before: int, is_sent: bool, message: bytes) -> Stamp:
        stamps = self._stamps[process]
        for stamp in reversed(stamps[: bisect_left(stamps, (before + 1,))]):
            if stamp.is_sent == is_sent and message in stamp.head:
                return stamp
        raise LookupError(message)


def shown(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds else ""


def zmq_request(endpoint: str, stack: contextlib.ExitStack) -> Request:
    """Return a function that streams a completion over ZeroMQ."""
    client = stack.enter_context(Client(endpoint))

    def request(number: int) -> tuple[int, int]:
        begin = time.monotonic_ns()
        stream = client.submit(f"The number {number} is", max_tokens=NUM_TOKENS, stream=True)
        deltas = iter(stream)
        next(deltas)
        end = time.monotonic_ns()
        stream.result()
        return begin, end

    return request


def http_request(port: int, stack: contextlib.ExitStack) -> Request:
    """Return a function that streams a chat over HTTP, always on the same connection."""
    connection = stack.enter_context(
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port))
    )

    def request(number: int) -> tuple[int, int]:
        messages = [{"role": "user", "content": f"The number {number} is"}]
        body = json.dumps({"messages": messages, "max_tokens": NUM_TOKENS, "stream": True})
        begin = time.monotonic_ns()
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        line = response.readline()
        end = time.monotonic_ns()
        rest = response.read()
        if response.status != http.HTTPStatus.OK:
            raise SystemExit(f"{response.status}: {line + rest!r}")
        return begin, end

    return request


def measure(options: argparse.Namespace, folder: str) -> list[list[Part]]:
    """Return the parts of each request."""
    port = free_port()
    own = {"log_level": "warning", "http": int(options.http), "http_port": port}
    if options.model:
        own["model"] = options.model
    commands = {} if options.model else {"worker": f"{STAND_IN} {STEP_MS}"}
    os.environ |= {"PYTHONPATH": str(STAMPS), "PENSTOCK_STAMPS": folder}
    moments = []
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(private_pipeline("hops", own, **commands))
        if options.http:
            wait_for_http(port)
        request = http_request(port, stack) if options.http else zmq_request(config.endpoint, stack)
        for number in range(NUM_WARM_UP + options.requests):
            time.sleep(options.rest / 1e3)
            moments.append(request(number))
        processes = {one.name.partition(".")[0]: one.pid for one in list_processes(config.name)}
    stamps = {
        process: msgspec.msgpack.decode((Path(folder) / str(pid)).read_bytes(), type=list[Stamp])
        for process, pid in processes.items()
    }
    stamps["client"] = [Stamp(*one) for one in sitecustomize.stamps]
    found = Processes(stamps, OVER_HTTP if options.http else OVER_ZMQ)
    return [found.follow(*one) for one in moments[NUM_WARM_UP:]]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="tests.tools.hops")
    parser.add_argument("--http", action="store_true", help="a chat over HTTP")
    parser.add_argument("--model", help="checkpoint; by default, a worker without a model")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rest", type=float, default=0, help="milliseconds before each request")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        requests = measure(options, folder)
    way = OVER_HTTP if options.http else OVER_ZMQ
    medians = [
        [median(times) / 1e3 for times in zip(*parts, strict=True)]
        for parts in zip(*requests, strict=True)
    ]
    rows = [
        [process, message.decode(), *map(shown, times)]
        for (process, message), times in zip(way, medians, strict=True)
    ]
    rows.append(["sum", "", *(shown(sum(times)) for times in zip(*medians, strict=True))])
    print(*table(("process", "sends", "wait before", "work", "CPU"), rows), sep="\n")
    ttft = median(sum(one.wait + one.work for one in parts) for parts in requests) / 1e3
    print(f"TTFT: {ttft:.0f}, the median of {len(requests)} requests")


if __name__ == "__main__":
    main()
