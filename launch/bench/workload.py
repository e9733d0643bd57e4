"""What the benchmarks ask for: prompts of random tokens, outputs of a given length."""

from random import Random
from typing import NamedTuple

MAX_TOKEN_ID = 10_000


class Item(NamedTuple):
    """One request."""

    prompt: list[int]
    num_output_tokens: int


def random_lengths(num_requests: int, min_tokens: int, max_tokens: int, seed: int) -> list[Item]:
    """Prompts and outputs of `min_tokens` to `max_tokens`, each length as likely as the others.

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


def fixed_lengths(
    num_requests: int, input_tokens: int, output_tokens: int, seed: int
) -> list[Item]:
    """Prompts of one length, outputs of another."""
    draw = Random(seed).randint  # noqa: S311
    prompts = [[draw(0, MAX_TOKEN_ID) for _ in range(input_tokens)] for _ in range(num_requests)]
    return [Item(prompt, output_tokens) for prompt in prompts]


def variant(items: list[Item], number: int, vocab_size: int) -> list[Item]:
    """The same lengths with other tokens, all in the vocabulary; 0 keeps those that are in it.

    The draws know nothing of the vocabulary, so that the lengths are the same for every model.
    """
    size = min(MAX_TOKEN_ID + 1, vocab_size)
    return [
        item._replace(prompt=[(token + number) % size for token in item.prompt]) for item in items
    ]
