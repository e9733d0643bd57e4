"""Digests of the logits of random sequences in different batches, which must be equal.

`python -m tests.gpu.determinism --model FOLDER --sequences 1000` prints a line for each way of
computing the same sequences: the number of logits, and how many differ from those of rows alone.
Other options are those of `launch all`; `--no-deterministic` shows that the test can fail.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import column
from penstock.launch.pipeline.options import add_options, given_options
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.messages.sampling import SamplingParams
from penstock.services.scheduler.sequence import Sequence
from tests.engine import Engine

NUM_OUT = 8
CHUNK = 128
"""tokens of the shortest chunks that all models take"""
PREFIX = 140
"""tokens with which half of the prompts begin"""
Digests = dict[tuple[int, int], int]
"""(seed, position) → digest of the logits for the token there"""


class Result(NamedTuple):
    """The logits and tokens of all sequences, by seed."""

    digests: Digests
    tokens: list[list[int]]
    logprobs: list[Any]

    def num_different(self, other: "Result") -> int:
        """Return how many logits, sequences of tokens or logprobs differ, or are missing."""
        keys = self.digests.keys() | other.digests.keys()
        return (
            sum(self.digests.get(key) != other.digests.get(key) for key in keys)
            + sum(one != two for one, two in zip(self.tokens, other.tokens, strict=True))
            + sum(one != two for one, two in zip(self.logprobs, other.logprobs, strict=True))
        )


class Recorder:
    """Digests of the logits of an engine's steps, made on the device."""

    def __init__(self, engine: Engine) -> None:
        self._seeds = column(engine.runner._slots.parameters, "seed")
        self._vocab_size = engine.model.vocab_size
        factors = torch.Generator(self._seeds.device).manual_seed(1)
        limits = -(2**62), 2**62
        size = (self._vocab_size,)
        self._factors = torch.randint(*limits, size, generator=factors, device=self._seeds.device)
        self._steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        complete = engine.runner._complete

        def record(rows: Any, computed: Any, *others: Any) -> Any:
            slots, positions, _ = computed.rows
            bits = computed.logits[:, : self._vocab_size].contiguous().view(torch.int32)
            parts = [(one.long() * self._factors).sum(1) for one in bits.split(32)]
            seeds = self._seeds[slots.clamp(min=0)]
            self._steps.append((slots.clone(), seeds, positions.clone(), torch.cat(parts)))
            return complete(rows, computed, *others)

        engine.runner._complete = record  # type: ignore[method-assign]

    def digests(self) -> Digests:
        """Return the digests since the last call."""
        found: Digests = {}
        for step in self._steps:
            for slot, seed, position, digest in zip(*(one.tolist() for one in step), strict=True):
                if slot >= 0:
                    assert found.setdefault((seed, position), digest) == digest
        self._steps.clear()
        return found


def random_prompts(number: int, vocab_size: int, longest: int = 600) -> list[list[int]]:
    """Return prompts of all lengths, of which half begin alike."""
    draw = random.Random(number)
    prefix = [draw.randrange(vocab_size) for _ in range(PREFIX)]
    lengths = [draw.choice([draw.randint(1, 70), draw.randint(1, longest)]) for _ in range(number)]
    return [
        prefix * (at % 2) + [draw.randrange(vocab_size) for _ in range(length)]
        for at, length in enumerate(lengths)
    ]


def sampling_of(seed: int, extras: bool) -> SamplingParams:
    """Return greedy and sampled rows in turn; extras: with penalties, bias and logprobs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.01},
        {"temperature": 2.0},
    ]
    more: dict[str, Any] = {}
    if extras:
        more = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {seed: 2.0}}
        more["logprobs"] = seed % 6
    fields = kinds[seed % len(kinds)] | more
    return SamplingParams(seed=seed, max_tokens=NUM_OUT, ignore_eos=True, **fields)


def run(
    engine: Engine,
    recorder: Recorder,
    prompts: list[list[int]],
    batch: int,
    preempts: bool = False,
    extras: bool = False,
) -> Result:
    """Compute all prompts, `batch` at a time."""
    sequences: list[Sequence] = []

    def disturb() -> None:
        for sequence in list(engine.scheduler.running):
            if preempts and sequence.num_preemptions < 2 < len(sequence.output_token_ids):
                engine.scheduler.preempt(sequence)

    for first in range(0, len(prompts), batch):
        for seed in range(first, min(first + batch, len(prompts))):
            sampling = sampling_of(seed, extras)
            sequences.append(engine.add(f"{time.monotonic_ns()}", prompts[seed], sampling))
        engine.run(disturb)
    logprobs = [[list(one.pairs()) for one in sequence.logprobs or []] for sequence in sequences]
    tokens = [list(one.output_token_ids) for one in sequences]
    return Result(recorder.digests(), tokens, logprobs)


def ways(options: dict[str, Any], number: int, batches: list[int]) -> Iterator[tuple[str, Result]]:
    """Yield the results of the same sequences, those of rows alone first."""
    most = max(batches)

    def engine_with(**changes: Any) -> tuple[Engine, Recorder]:
        gc.collect()
        torch.cuda.empty_cache()
        plain = {"enable_prefix_caching": False, "max_num_seqs": most, "kv_cache_gib": 4.0}
        engine = Engine(Config(**plain | options | changes))
        return engine, Recorder(engine)

    made = engine_with()
    prompts = random_prompts(number, made[0].model.vocab_size)
    for batch in batches:
        yield f"{batch} at a time", run(*made, prompts, batch)
    yield "preempted, 17 at a time", run(*made, prompts, 17, preempts=True)
    del made
    made = engine_with(max_num_seqs=17, max_num_batched_tokens=17 + CHUNK)
    yield f"chunks of {CHUNK} tokens", run(*made, prompts, 17)
    del made
    made = engine_with(enable_prefix_caching=True)
    yield "with a prefix cache", run(*made, prompts, 64)
    yield "all cached", run(*made, prompts, 3)
    del made
    made = engine_with(enable_cuda_graphs=False, block_size=16)
    yield "no graphs, blocks of 16", run(*made, prompts, 17)


def with_extras(options: dict[str, Any], number: int) -> list[Result]:
    """Return the results of rows with penalties, bias and logprobs, alone and together."""
    engine = Engine(Config(**{"kv_cache_gib": 4.0, "max_num_seqs": 64} | options))
    recorder = Recorder(engine)
    prompts = random_prompts(number, engine.model.vocab_size)
    return [run(engine, recorder, prompts, batch, extras=True) for batch in (1, 5, 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 3, 17, 64, 200])
    add_options(parser, Config, OPTIONS)
    arguments = parser.parse_args()
    options = {"device": "cuda", "deterministic": True} | given_options(arguments, Config)
    first = None
    for name, result in ways(options, arguments.sequences, arguments.batches):
        first = first or result
        different = result.num_different(first)
        print(f"{name}: {len(result.digests)} logits, {different} differ", flush=True)
    alone, *others = with_extras(options, min(arguments.sequences, 64))
    print(f"extras: {[one.num_different(alone) for one in others]} differ", flush=True)


if __name__ == "__main__":
    main()
