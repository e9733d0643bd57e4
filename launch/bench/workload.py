"""Workloads of the benchmarks: prompts of random tokens, outputs of a given length."""

import itertools
from random import Random
from typing import NamedTuple

MAX_TOKEN_ID = 10_000


class Item(NamedTuple):
    """One request."""

    prompt: list[int]
    num_output_tokens: int


def random_lengths(num_requests: int, min_tokens: int, max_tokens: int, seed: int) -> list[Item]:
    """Return prompts and outputs of `min_tokens` to `max_tokens`, all equally likely.

    The draws are those of bench.py of https://github.com/GeeeekExplorer/nano-vllm, in its order:
    256 requests of 100 to 1,024 tokens with seed 0 have 142,827 prompt tokens and 133,966 output
    tokens.
    """
    draw = Random(seed).randint  # noqa: S311  to be repeatable, not secret
    prompts = [
        [draw(0, MAX_TOKEN_ID) for _ in range(draw(min_tokens, max_tokens))]
        for _ in range(num_requests)
    ]
    return [Item(prompt, draw(min_tokens, max_tokens)) for prompt in prompts]


def given_lengths(input_tokens: list[int], output_tokens: int, seed: int) -> list[Item]:
    """Return prompts of these lengths, and outputs of one length."""
    draw = Random(seed).randint  # noqa: S311
    prompts = [[draw(0, MAX_TOKEN_ID) for _ in range(length)] for length in input_tokens]
    return [Item(prompt, output_tokens) for prompt in prompts]


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Return the seconds of arrivals, the first at 0: a Poisson process of `rate` a second."""
    draw = Random(f"arrivals {seed}").expovariate  # noqa: S311
    return list(itertools.accumulate((draw(rate) for _ in range(num_requests - 1)), initial=0.0))


def random_kinds(num_requests: int, long_share: float, seed: int) -> list[str]:
    """ "short" or "long" for each request: the share is kept, the order is random."""
    num_long = round(long_share * num_requests)
    kinds = ["long"] * num_long + ["short"] * (num_requests - num_long)
    Random(f"kinds {seed}").shuffle(kinds)  # noqa: S311
    return kinds


def variant(items: list[Item], number: int, vocab_size: int) -> list[Item]:
    """Return items of the same lengths with other tokens of the vocabulary; 0 keeps valid ones.

    The draws know nothing of the vocabulary, so that the lengths are the same for every model.
    """
    size = min(MAX_TOKEN_ID + 1, vocab_size)
    return [
        item._replace(prompt=[(token + number) % size for token in item.prompt]) for item in items
    ]
