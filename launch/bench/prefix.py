"""`launch bench prefix`: what routing by prefix saves, by conversations that begin alike.

Some system prompts are shared by many conversations. A turn of one is sent when the turn before is
answered, and its prompt is all that was said before and something new.
"""

import asyncio
import statistics
import sys
import time
from argparse import Namespace
from random import Random
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from penstock.launch.bench.target import Target, target
from penstock.launch.bench.workload import MAX_TOKEN_ID
from penstock.protocol.client.client import AsyncClient
from penstock.protocol.config import Config


class Result(Struct):
    """One pipeline's run."""

    routing: str
    requests: int
    input_tokens: int
    cached_tokens: int
    """those of the input that came from a prefix cache"""
    hit_rate: float
    possible_hit_rate: float
    """of one cache that forgets nothing"""
    mean_ttft_ms: float
    output_throughput: float
    """tokens a second"""
    duration: float


def bench_prefix(arguments: Namespace) -> list[Result]:
    """In a running pipeline, or in one of our own for each routing, unless one is given."""
    if arguments.name or arguments.endpoint:
        return [_bench(arguments)]
    given = vars(arguments)
    given.setdefault("enable_prefix_caching", True)
    routings = (
        [given["routing"]] if "routing" in given else get_args(get_type_hints(Config)["routing"])
    )
    results = []
    for arguments.routing in routings:
        results.append(_bench(arguments))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def _bench(arguments: Namespace) -> Result:
    with target(arguments) as pipeline:
        return asyncio.run(_Conversations(pipeline, arguments).run())


class _Conversations:
    def __init__(self, pipeline: Target, arguments: Namespace) -> None:
        self._pipeline = pipeline
        self._arguments = arguments
        self._draw = Random(arguments.bench_seed)  # noqa: S311  to be repeatable, not secret
        self._gate = asyncio.Semaphore(arguments.concurrency)
        self._sampling = {
            name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")
        }
        self._ttft: list[float] = []
        self._num_inputs = self._num_cached = self._num_outputs = 0

    async def run(self) -> Result:
        """All conversations, so many at once."""
        its, pipeline = self._arguments, self._pipeline
        systems = [self._tokens(its.system_tokens) for _ in range(its.system_prompts)]
        new = [
            [self._tokens(its.input_tokens) for _ in range(its.turns)]
            for _ in range(its.conversations)
        ]
        async with AsyncClient(pipeline.endpoint, keys=pipeline.keys) as client:
            await client.status(wait=True)
            start = time.perf_counter()
            await asyncio.gather(
                *(
                    self._converse(client, systems[number % len(systems)], inputs)
                    for number, inputs in enumerate(new)
                )
            )
            duration = time.perf_counter() - start
        num_new = len(systems) * its.system_tokens + its.input_tokens * its.turns * len(new)
        return Result(
            routing=pipeline.config.routing if pipeline.config else "",
            requests=len(self._ttft),
            input_tokens=self._num_inputs,
            cached_tokens=self._num_cached,
            hit_rate=self._num_cached / self._num_inputs,
            possible_hit_rate=1 - num_new / self._num_inputs,
            mean_ttft_ms=statistics.mean(self._ttft) * 1e3,
            output_throughput=self._num_outputs / duration,
            duration=duration,
        )

    def _tokens(self, number: int) -> list[int]:
        largest = min(MAX_TOKEN_ID, self._pipeline.vocab_size - 1)
        return [self._draw.randint(0, largest) for _ in range(number)]

    async def _converse(
        self, client: AsyncClient, prompt: list[int], inputs: list[list[int]]
    ) -> None:
        async with self._gate:
            for tokens in inputs:
                prompt = prompt + tokens
                prompt = prompt + await self._ask(client, prompt)

    async def _ask(self, client: AsyncClient, prompt: list[int]) -> list[int]:
        fields: dict[str, Any] = {"max_tokens": self._arguments.output_tokens, "ignore_eos": True}
        start = time.perf_counter()
        stream = client.stream(prompt, **fields, **self._sampling)
        await anext(aiter(stream))
        self._ttft.append(time.perf_counter() - start)
        reply = await stream.result()
        self._num_inputs += reply.usage.prompt_tokens
        self._num_cached += reply.usage.cached_tokens
        self._num_outputs += len(reply.token_ids)
        return reply.token_ids


def as_table(results: list[Result]) -> str:
    """The results as a markdown table."""
    rows = [
        "| routing | requests | prompt tokens | cached | possible | TTFT ms | output tokens/s |",
        "| --- " * 7 + "|",
    ]
    rows += [
        f"| {one.routing} | {one.requests} | {one.input_tokens:,} | {one.hit_rate:.1%} | "
        f"{one.possible_hit_rate:.1%} | {one.mean_ttft_ms:,.1f} | {one.output_throughput:,.0f} |"
        for one in results
    ]
    return "\n".join(rows)
