"""Options of the benchmarks, and the requests made from them."""

import itertools
from argparse import ArgumentTypeError
from random import Random
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.messages.sampling import Share

Count = Annotated[int, Meta(ge=1)]
GOODPUT = ("ttft", "tpot", "e2el")
MAX_TOKEN_ID = 10_000


class BenchOptions(Struct, kw_only=True):
    """Options of every subject."""

    runs: Count = 3
    """number of runs; the median is shown"""


class PipelineOptions(BenchOptions):
    """Options of `launch bench pipeline`."""

    batches: tuple[Count, ...] = (1, 64, 256)
    """requests in flight"""
    detokenizers: tuple[Count, ...] = (1, 2, 4)
    """detokenizer processes"""
    max_tokens: Count = 1000
    """tokens of each request"""


class EventsOptions(BenchOptions):
    """Options of `launch bench events`."""

    step_ms: tuple[Annotated[float, Meta(ge=0, le=1000)], ...] = (25.0, 0.0)
    """duration of the stand-in worker's steps, milliseconds; 0: no wait"""
    streams: Count = 256
    """concurrent streams, each on its own connection"""
    max_tokens: Count = 400
    """tokens of each stream"""
    http: Count = 1
    """http processes"""
    detokenizers: Count = 1
    """detokenizer processes"""


class ModelOptions(BenchOptions):
    """Options of every subject with a model."""

    bench_seed: int = 0
    """random seed of the prompts"""
    temperature: float = 0.6
    """sampling temperature; 0: greedy"""
    top_k: int = -1
    """sample from the k most likely tokens; -1: all"""
    top_p: float = 1.0
    """sample from the top tokens with this total probability; 1: all"""


class OfflineOptions(ModelOptions):
    """Options of `launch bench offline`."""

    num_requests: Count = 256
    """number of requests, all sent at once"""
    min_tokens: Count = 100
    """shortest prompt, and shortest output"""
    max_tokens: Count = 1024
    """longest prompt, and longest output"""

    def __post_init__(self) -> None:
        least, most = self.min_tokens, self.max_tokens
        if least > most:
            raise LaunchError(f"--min-tokens is {least}: more than --max-tokens, {most}")


class LatencyOptions(ModelOptions):
    """Options of `launch bench latency`."""

    batches: tuple[Count, ...] = (1, 16, 64)
    """requests in flight"""
    input_tokens: Count = 256
    """tokens of each prompt"""
    output_tokens: Count = 256
    """tokens of each output"""


class ServeOptions(ModelOptions):
    """Options of `launch bench serve`."""

    runs: Count = 1
    """number of runs; the median is shown"""
    num_requests: Count = 200
    """number of requests in a run"""
    request_rate: Annotated[float, Meta(gt=0, le=1e6)] = 10.0
    """mean requests per second (Poisson process)"""
    input_tokens: Count = 256
    """tokens of each short prompt"""
    long_input_tokens: Count = 8192
    """tokens of each long prompt"""
    long_share: Share = 0.0
    """share of requests with a long prompt, from 0 to 1"""
    output_tokens: Count = 256
    """tokens of each output"""
    max_concurrency: Annotated[int, Meta(ge=0)] = 0
    """most requests in flight; without --request-rate, as many are all the time; 0: any number"""
    goodput: dict[str, float] = {}

    def __post_init__(self) -> None:
        self.goodput = dict(self.goodput)


def limit(text: str) -> tuple[str, float]:
    """Parse a latency and its limit in milliseconds: `ttft:500`."""
    name, _, number = text.partition(":")
    if name not in GOODPUT:
        raise ArgumentTypeError(f"{text!r} is none of {', '.join(GOODPUT)} with :MILLISECONDS")
    if not number.replace(".", "", 1).isdecimal() or not float(number):
        raise ArgumentTypeError(f"got {number!r}, expected a finite number above 0")
    return name, float(number)


class Item(NamedTuple):
    """Request of a benchmark."""

    prompt: list[int]
    num_output_tokens: int


def random_lengths(num_requests: int, min_tokens: int, max_tokens: int, seed: int) -> list[Item]:
    """Return prompts and outputs with uniformly random lengths, `min_tokens` to `max_tokens`.

    The draws follow bench.py of https://github.com/GeeeekExplorer/nano-vllm, in its order: 256
    requests of 100 to 1,024 tokens with seed 0 have 142,827 prompt tokens and 133,966 output
    tokens.
    """
    draw = Random(seed).randint  # noqa: S311  to be repeatable, not secret
    prompts = [
        [draw(0, MAX_TOKEN_ID) for _ in range(draw(min_tokens, max_tokens))]
        for _ in range(num_requests)
    ]
    return [Item(prompt, draw(min_tokens, max_tokens)) for prompt in prompts]


def given_lengths(input_tokens: list[int], output_tokens: int, seed: int) -> list[Item]:
    """Return prompts of these lengths, and outputs of a single length."""
    draw = Random(seed).randint  # noqa: S311
    prompts = [[draw(0, MAX_TOKEN_ID) for _ in range(length)] for length in input_tokens]
    return [Item(prompt, output_tokens) for prompt in prompts]


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Return arrival times in seconds, starting at 0: a Poisson process of `rate` per second."""
    draw = Random(f"arrivals {seed}").expovariate  # noqa: S311
    return list(itertools.accumulate((draw(rate) for _ in range(num_requests - 1)), initial=0.0))


def random_kinds(num_requests: int, long_share: float, seed: int) -> list[str]:
    """Return "short" or "long" for each request; the share is exact, the order is random."""
    num_long = round(long_share * num_requests)
    kinds = ["long"] * num_long + ["short"] * (num_requests - num_long)
    Random(f"kinds {seed}").shuffle(kinds)  # noqa: S311
    return kinds


def variant(items: list[Item], number: int, vocab_size: int) -> list[Item]:
    """Return items of the same lengths with other tokens of the vocabulary; 0 keeps valid tokens.

    The draws do not depend on the vocabulary, so that the lengths are the same for every model.
    """
    size = min(MAX_TOKEN_ID + 1, vocab_size)
    return [
        item._replace(prompt=[(token + number) % size for token in item.prompt]) for item in items
    ]
