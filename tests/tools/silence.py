"""Longest silence of streams while other clients send expensive requests to a running pipeline.

    launch all --target-itl-ms 100
    python -m tests.tools.silence tcp://127.0.0.1:5555

Each load is `NUM_CLIENTS` requests at a time, which a process of its own sends. The first load is
that of plain requests, with which the others are compared.
"""

import argparse
import asyncio
import random
import subprocess
import sys
from asyncio import timeout
from contextlib import suppress
from statistics import median
from time import monotonic
from typing import Any

from penstock.launch.bench.figures import table
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.structured import StructuredOutputs

NUM_CLIENTS, NUM_STREAMS = 8, 4
PROMPT = 3600  # tokens of the demo model, which are bytes
BEGIN = 3.0  # seconds of a load before the streams
LOADS = "plain", "long prompts", "prompt logprobs", "grammars", "repetition", "aborts"


class Streams:
    """Streams that follow each other, with the seconds between tokens and to first tokens."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.first: list[float] = []

    async def run(self, client: AsyncClient) -> None:
        async with asyncio.TaskGroup() as streams:
            for number in range(NUM_STREAMS):
                streams.create_task(self._stream(client, f"count from 1 to {200 + 10 * number}"))

    async def _stream(self, client: AsyncClient, prompt: str) -> None:
        while True:
            last, seconds = monotonic(), self.first
            async for _ in client.stream(prompt, max_tokens=2000):
                now = monotonic()
                seconds.append(now - last)
                last, seconds = now, self.gaps


def request(load: str, randoms: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the prompt and the fields of a request of a load."""
    text = "".join(randoms.choices("abcdefghij klmno", k=PROMPT))
    if load == "long prompts":
        return text, {"max_tokens": 4}
    if load == "prompt logprobs":
        return text, {"max_tokens": 4, "prompt_logprobs": 5}
    if load == "repetition":
        return f"abc {text[:3]}" * (PROMPT // 7), {"max_tokens": 200, "ignore_eos": True}
    if load == "aborts":
        return text, {"max_tokens": 64}
    if load == "plain":
        return f"count from {randoms.randrange(9)} to 60", {"max_tokens": 64}
    properties = {
        text[at : at + 9]: {"type": "string", "pattern": f"^[a-z]{{{at + 1},{at + 20}}}$"}
        for at in range(12)
    }
    schema = {"type": "object", "properties": properties, "required": [text[:9]]}
    return "?", {"max_tokens": 40, "structured_outputs": StructuredOutputs(json=schema)}


async def send(client: AsyncClient, load: str, randoms: random.Random) -> None:
    """Send one request after the other; of aborts, each ends within 0.2 s."""
    while True:
        prompt, fields = request(load, randoms)
        stream = client.stream(prompt, **fields)
        seconds = randoms.random() / 5 if load == "aborts" else None
        with suppress(TimeoutError):
            async with timeout(seconds):
                await stream.result()
        await stream.abort()


async def send_load(endpoint: str, load: str) -> None:
    async with AsyncClient(endpoint) as client, asyncio.TaskGroup() as tasks:
        for number in range(NUM_CLIENTS):
            tasks.create_task(send(client, load, random.Random(f"{load} {number}")))


async def measure(endpoint: str, load: str, seconds: float) -> Streams:
    streams = Streams()
    command = [sys.executable, "-m", "tests.tools.silence", endpoint, "--send", load]
    with subprocess.Popen(command) as sender:
        try:
            async with AsyncClient(endpoint) as client:
                await client.status(wait=True)
                await asyncio.sleep(BEGIN)
                with suppress(TimeoutError):
                    async with timeout(seconds):
                        await streams.run(client)
        finally:
            sender.kill()
    return streams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS)
    parser.add_argument("--send", help="send this load only, until the process is killed")
    options = parser.parse_args()
    if options.send:
        asyncio.run(send_load(options.endpoint, options.send))
    rows: list[list[str]] = []
    plain = 0.0
    for load in options.loads:
        found = asyncio.run(measure(options.endpoint, load, options.seconds))
        longest = max(found.gaps)
        plain = plain or longest
        numbers = median(found.gaps), longest, max(found.first)
        times = f"{longest / plain:.1f}"
        rows.append([load, *(f"{1000 * number:,.0f}" for number in numbers), times])
    print("\n".join(table(["load", "ITL ms", "longest", "TTFT, longest", "times plain"], rows)))


if __name__ == "__main__":
    main()
