"""The gated delta rule of one layer: `python -m tests.gpu.delta_rule`.

Prints microseconds of decode by rows and window, with the share of a copy's rate at which states
are read and written; of the prefill of 8,192 tokens, with its error; and of the gated norm.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.bench.timing import graph_us, l2_bytes
from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch, tile_size
from penstock.kernels.layouts.states import StateStep
from penstock.kernels.recurrent import triton_inputs
from penstock.kernels.recurrent.triton_chunks import ChunkTuning, apply_chunks
from penstock.kernels.recurrent.triton_delta_rule import apply_tokens, gated_delta_rule
from penstock.kernels.recurrent.triton_gated_norm import gated_rms_norm
from tests.gpu.copy_rate import copy_rate
from tests.kernels.recurrent.cases import (
    TAPS,
    WINDOW,
    Inputs,
    Sizes,
    Weights,
    loop,
    relative_error,
)

MODELS = {"27B": Sizes(16, 48, 128), "35B-A3B": Sizes(16, 32, 128)}
ROWS = (1, 16, 64, 256)
WINDOWS = ((1, 1), (4, 3))
"""(tokens of a row, tokens of the window before it)"""
PROMPTS = ((1, 8192), (8, 1024))
"""(rows, tokens of each)"""
TUNINGS = [
    *(ChunkTuning(*sizes) for sizes in product((1, 2, 3), (32, 64, 128), (4, 8))),
    ChunkTuning(chunk_warps=2),
    ChunkTuning(chunk_warps=8),
]


class Case(NamedTuple):
    """A layer in a step."""

    weights: Weights
    inputs: Inputs
    batch: ForwardBatch
    step: StateStep
    state: tuple[Tensor, ...]

    def prepare(self) -> triton_inputs.Inputs:
        return triton_inputs.prepare(
            *self.inputs, *self.weights[1:], num_key_heads=self.weights.sizes.key_heads,
            batch=self.batch, step=self.step, state=self.state,
        )  # fmt: skip

    def run(self) -> Tensor:
        return gated_delta_rule(
            *self.inputs, *self.weights[1:], num_key_heads=self.weights.sizes.key_heads,
            batch=self.batch, state=self.state,
        )  # fmt: skip

    @property
    def out(self) -> Tensor:
        sizes = self.weights.sizes
        return self.inputs.qkv.new_empty(len(self.inputs.qkv), sizes.heads, sizes.size)


def state_of(sizes: Sizes, num_blocks: int) -> tuple[Tensor, ...]:
    shapes = (TAPS - 1, sizes.channels), (WINDOW, sizes.channels)
    inputs, window = (torch.randn(num_blocks, *shape, device="cuda") for shape in shapes)
    gates = -torch.rand(num_blocks, sizes.heads, WINDOW, 2, device="cuda")
    recurrent = torch.randn(num_blocks, sizes.heads, sizes.size, sizes.size, device="cuda")
    return recurrent, inputs, window, gates


def decode_case(sizes: Sizes, num: int, tokens: int, accepted: int) -> Case:
    """Return `num` sequences with `tokens` rows each."""
    longs = partial(torch.tensor, device="cuda")
    sequence = torch.arange(num, device="cuda").repeat_interleave(tokens)
    first = torch.full((num * tokens,), 1000, device="cuda")
    place = torch.arange(num * tokens, device="cuda") % tokens
    lengths, index = (first + place + 1).int(), torch.arange(num * tokens + 1, device="cuda").int()
    state = state_of(sizes, 2 * num + 1)
    step = StateStep(
        [list(state)], 2 * sequence, 2 * sequence + 1, first, first + tokens,
        torch.full_like(first, accepted), longs([0]).expand(num * tokens),
    )  # fmt: skip
    shape = BatchShape(num * tokens, num * tokens, num * tokens, 0, 64, 1, 2000)
    batch = ForwardBatch(
        shape, first, first + place, first, index, index, lengths, lengths,
        torch.zeros(0, 2, device="cuda").int(), index[:, None], step,
    )  # fmt: skip
    weights = Weights.random(sizes, torch.bfloat16, "cuda")
    return Case(weights, Inputs.random(num * tokens, *weights_of(weights)), batch, step, state)


def prefill_case(sizes: Sizes, num: int, length: int) -> Case:
    """Return `num` whole prompts."""
    size = tile_size(length, 0, 1)
    tiles = [(row, first) for row in range(num) for first in range(length - size, -1, -size)]
    rows = torch.arange(num, device="cuda")
    state = state_of(sizes, num + 1)
    step = StateStep(
        [list(state)], rows * 0 - 1, rows, rows * 0, rows * 0 + length, rows * 0, rows * 0 + length
    )
    total = num * length
    positions = torch.arange(total, device="cuda") % length
    bounds = (torch.arange(num + 1, device="cuda") * length).int()
    batch = ForwardBatch(
        BatchShape(num, total, 0, len(tiles), size, length, length), positions, positions,
        positions, bounds, bounds, (rows * 0 + length).int(), rows.int()[:0],
        torch.tensor(tiles, device="cuda").int(), bounds[:, None], step,
    )  # fmt: skip
    weights = Weights.random(sizes, torch.bfloat16, "cuda")
    return Case(weights, Inputs.random(total, *weights_of(weights)), batch, step, state)


def weights_of(weights: Weights) -> tuple[Sizes, torch.dtype, str]:
    return weights.sizes, weights.conv_weight.dtype, "cuda"


def measure_decode(name: str, sizes: Sizes, rate: float) -> None:
    for num, (tokens, accepted) in product(ROWS, WINDOWS):
        moved = 2 * num * sizes.heads * sizes.size**2 * 4
        copies = max(2, -(-2 * l2_bytes() // moved))
        cases = [decode_case(sizes, num, tokens, accepted) for _ in range(copies)]
        whole = graph_us([case.run for case in cases])
        inputs = graph_us([case.prepare for case in cases])
        prepared = [(case, case.prepare(), case.out) for case in cases]
        tokens_us = graph_us(
            [
                partial(apply_tokens, given, case.batch, case.step, case.state[0], out)
                for case, given, out in prepared
            ]
        )
        print(
            f"{name} {num:3} rows, window {tokens}, {accepted} before: {whole:6.1f} µs "
            f"({moved / whole / rate:4.0%}); inputs {inputs:.1f}, tokens {tokens_us:.1f}",
            flush=True,
        )


def measure_prefill(name: str, sizes: Sizes, all_tunings: bool) -> None:
    for num, length in PROMPTS:
        case = prefill_case(sizes, num, length)
        pairs = num * length * sizes.heads * sizes.size
        flops = pairs * (6 * sizes.size + 10 * 64)
        us, inputs = graph_us([case.run]), graph_us([case.prepare])
        given, out = case.prepare(), case.out
        tail = graph_us(
            [partial(apply_tokens, given, case.batch, case.step, case.state[0], out, tail=True)]
        )
        print(
            f"{name} {num} x {length} tokens: {us:.0f} µs, {flops / us / 1e6:.0f} TFLOP/s; inputs "
            f"{inputs:.0f}, tail {tail:.1f}",
            flush=True,
        )
        for tuning in TUNINGS if all_tunings else []:
            call = partial(apply_chunks, given, case.batch, case.step, case.state[0], out, tuning)
            print(f"  chunks, {text_of(call)} µs: {tuning}", flush=True)


def text_of(call: Callable[[], object]) -> str:
    """Return the time of a call, or the error of one that does not fit the GPU."""
    try:
        return f"{graph_us([call]):.0f}"
    except Exception as error:  # noqa: BLE001  reported
        return repr(error)[:80]


def errors(sizes: Sizes, length: int) -> str:
    """Return the errors of a prompt's outputs and last state, against a loop in float64."""
    case = prefill_case(sizes, 1, length)
    expected, states = loop(case.weights, case.inputs)
    out = case.out.float()
    apply_chunks(case.prepare(), case.batch, case.step, case.state[0], out)
    output = relative_error(out, expected), relative_error(case.state[0][0], states[-1])
    rounded = relative_error(expected.bfloat16(), expected)
    return f"outputs {output[0]:.1e}, state {output[1]:.1e}; rounding to bfloat16 {rounded:.1e}"


def measure_norm(sizes: Sizes) -> None:
    for num in (1, 64, 8192):
        shape = num, sizes.heads, sizes.size
        copies = max(2, -(-2 * l2_bytes() // (num * sizes.heads * sizes.size * 6)))
        x = [torch.randn(shape, device="cuda").bfloat16() for _ in range(min(copies, 64))]
        weight = x[0][0, 0].clone()
        us = graph_us([partial(gated_rms_norm, one, one, weight, 1e-6) for one in x])
        print(f"gated norm, {num} tokens: {us:.1f} µs")


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tunings", action="store_true", help="measure all tunings of prefill")
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy reads and writes {rate / 1e6:.2f} TB/s")
    for name, sizes in MODELS.items():
        measure_decode(name, sizes, rate)
    for name, sizes in MODELS.items():
        measure_prefill(name, sizes, arguments.tunings)
    print("errors of 1,024 tokens:", errors(MODELS["27B"], 1024))
    measure_norm(MODELS["27B"])


if __name__ == "__main__":
    main()
