"""Effect of fewer bits, against the same model without: on a CPU that is in float32.

    python -m tests.gpu.accuracy [--model FOLDER] --quantization fp8 --kv-cache-dtype fp8

Other options are those of `launch all`. Perplexity and likeliest tokens are those of `accuracy.txt`
(Lincoln, Melville, Austen, Carroll) in windows, and of the answers to the demo model's held-out
tasks. Greedy tokens continue half a window, and a task.
"""

import argparse
import gc
import math
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from penstock.launch.pipeline.options import add_options, given_options
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.messages.sampling import SamplingParams
from tests.engine import Engine
from tests.tools.demo.dialogues import IGNORED, plain
from tests.tools.demo.tasks import TASK_NAMES, Sizes, make_example

TEXT = Path(__file__).with_name("accuracy.txt")
WINDOW = 256
"""tokens"""
NUM_TASKS = 200
OUTPUT_TOKENS = 96
SIZES = {"count": Sizes(1, 20), "reverse": Sizes(1, 20), "repeat": Sizes(1, 40)}
ALL_BITS = {"quantization": "none", "quantize_lm_head": False, "kv_cache_dtype": "auto"}
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class Item(NamedTuple):
    """A text, of which greedy tokens continue the beginning."""

    token_ids: list[int]
    num_given: int
    num_unscored: int
    """tokens that the model has not learned to foretell"""


class Measured(NamedTuple):
    """Results of all texts, one after the other."""

    logprobs: list[float]
    """of their tokens, as far as they count"""
    likeliest: list[int]
    greedy: list[list[int]]

    @property
    def perplexity(self) -> float:
        """Return the perplexity of the texts."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def windows(folder: Path) -> list[Item]:
    """Return the text in pieces."""
    token_ids = AutoTokenizer.from_pretrained(folder).encode(TEXT.read_text())
    pieces = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - 1, WINDOW)]
    return [Item(piece, (len(piece) + 1) // 2, 1) for piece in pieces]


def tasks() -> list[Item]:
    """Return tasks of the demo model, with their answers."""
    rng = Random(0)
    names = (TASK_NAMES[n % len(TASK_NAMES)] for n in range(NUM_TASKS))
    dialogues = (plain(make_example(rng, name, SIZES.get(name), held_out=True)) for name in names)
    return [Item(one.token_ids, *[one.labels.count(IGNORED)] * 2) for one in dialogues]


def measure(config: Config, items: list[Item]) -> Measured:
    """By a worker of this process."""
    engine = Engine(config)
    asking = SamplingParams(**GREEDY, max_tokens=1, prompt_logprobs=1)  # type: ignore[arg-type]
    told = [engine.add(f"all of {n}", item.token_ids, asking) for n, item in enumerate(items)]
    engine.run()
    greedy = SamplingParams(**GREEDY, max_tokens=OUTPUT_TOKENS)  # type: ignore[arg-type]
    going_on = [
        engine.add(f"start of {n}", item.token_ids[: item.num_given], greedy)
        for n, item in enumerate(items)
    ]
    engine.run()
    pairs = [
        packed.pairs()
        for one, item in zip(told, items, strict=True)
        for packed in (one.prompt_logprobs or [])[item.num_unscored - 1 :]
    ]
    own, likeliest = zip(*((its[0][1], its[1][0]) for its in pairs), strict=True)
    return Measured(list(own), list(likeliest), [list(one.output_token_ids) for one in going_on])


def num_same(ours: list[int], theirs: list[int]) -> int:
    """Tokens in front of the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def num_right(items: list[Item], measured: Measured) -> int:
    """Return the number of texts whose continuation is unchanged."""
    rest = (item.token_ids[item.num_given :] for item in items)
    return sum(one == other for one, other in zip(rest, measured.greedy, strict=True))


def row(name: str, items: list[Item], full: Measured, fewer: Measured) -> str:
    """Return a row of the table."""
    likeliest = zip(full.likeliest, fewer.likeliest, strict=True)
    num_tokens = len(full.likeliest)
    num_greedy = sum(map(len, full.greedy))
    same_greedy = sum(map(num_same, fewer.greedy, full.greedy))
    return (
        f"| {name} | {num_tokens} | {full.perplexity:.6g} → {fewer.perplexity:.6g} "
        f"| {sum(one == other for one, other in likeliest) / num_tokens:.2%} "
        f"| {same_greedy / num_greedy:.2%} of {num_greedy} "
        f"| {num_right(items, full)} → {num_right(items, fewer)} of {len(items)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, Config, OPTIONS)
    options = {"enable_prefix_caching": False, "kv_cache_gib": 1.0}
    options |= given_options(parser.parse_args(), Config)
    folder = Config(**options).model_folder  # type: ignore[arg-type]
    sets = {"text": windows(folder)}
    if folder == Config().model_folder:
        sets["tasks"] = tasks()
    print("| | tokens | perplexity | likeliest is the same | greedy is the same | right |")
    print("| --- | --: | --: | --: | --: | --: |", flush=True)
    for name, items in sets.items():
        both = []
        for config in (Config(**options | ALL_BITS), Config(**options)):  # type: ignore[arg-type]
            both.append(measure(config, items))
            gc.collect()
            torch.cuda.empty_cache()
        print(row(name, items, *both), flush=True)


if __name__ == "__main__":
    main()
