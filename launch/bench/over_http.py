"""The load of `launch bench serve` over HTTP: OpenAI's completions as streams."""

import asyncio
import time
from typing import Any

import msgspec
from msgspec import Struct

from penstock.launch.bench.measure import Meter, Run, run_of
from penstock.launch.bench.pipeline import cpu_seconds
from penstock.launch.bench.streams import Times
from penstock.launch.bench.target import Target
from penstock.launch.bench.workload import Item
from penstock.launch.errors import LaunchError
from penstock.launch.http_client import HttpClient


class _Choice(Struct):
    text: str


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class HttpTimes(Times):
    """The times of a stream of server-sent events."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter())
        self.num_inputs = 0
        self._rest = b""

    def on_body(self, piece: bytes) -> None:
        """Takes bytes of the answer."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._on_chunk(_decode(event[6:]))

    def _on_chunk(self, chunk: _Chunk) -> None:
        if any(choice.text for choice in chunk.choices):
            self.times.append(time.perf_counter())
        if chunk.usage:
            self.num_inputs = chunk.usage.prompt_tokens
            self.num_tokens = chunk.usage.completion_tokens


def measure_http(
    meter: Meter, items: list[Item], times: list[float]
) -> tuple[tuple[Run, list[Times]], float]:
    """As `Meter.run_load`, on as many connections as there are requests at once; and the CPU time
    of the HTTP processes, seconds. Raises LaunchError where there are none."""
    target = meter.target
    if not target.url or target.config is None:
        raise LaunchError("--http needs a pipeline with HTTP processes: `launch all --http 1`")
    before = cpu_seconds(target.config.name)["http"]
    load = asyncio.run(_load(target, items, times, meter.sampling))
    meter.settle()
    return load, cpu_seconds(target.config.name)["http"] - before


async def _load(
    target: Target, items: list[Item], times: list[float], sampling: dict[str, Any]
) -> tuple[Run, list[Times]]:
    idle: list[HttpClient] = []
    start = time.perf_counter()

    async def one(item: Item, seconds: float) -> HttpTimes:
        body = _body(item, sampling)
        await asyncio.sleep(start + seconds - time.perf_counter())
        client = idle.pop() if idle else HttpClient(target.url, target.api_key)
        stamps = HttpTimes()
        answered = await client.post("/v1/completions", body, stamps.on_body)
        if answered.status != 200:
            stamps.times.clear()
        idle.append(client)
        return stamps

    stamps = await asyncio.gather(*map(one, items, times))
    seconds = time.perf_counter() - start
    for client in idle:
        client.close()
    run = run_of(
        sum(bool(one.times) for one in stamps),
        sum(one.num_inputs for one in stamps),
        sum(one.num_tokens for one in stamps),
        seconds,
        failed=sum(not one.times for one in stamps),
    )
    return run, list(stamps)


def _body(item: Item, sampling: dict[str, Any]) -> bytes:
    return msgspec.json.encode(
        {
            "prompt": item.prompt,
            "max_tokens": item.num_output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
    )
