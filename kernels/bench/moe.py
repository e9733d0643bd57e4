"""A layer's mixture of experts: its time beside that of reading the experts it really touches.

    python -m penstock.kernels.bench.moe [--size 30B] [--tp 1] [--dtype fp8] [--tokens 1 16 64]
        [--sweep]

Microseconds: what reading the touched experts' weights and what multiplying would take alone, then
what a layer takes, without its router and norm, and each product. The tokens' experts are random,
and others in every call. --sweep tries more cuts.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from penstock.kernels.bench.timing import graph_us
from penstock.kernels.moe.moe import norm_moe
from penstock.kernels.moe.triton_moe import (
    Cut,
    Routing,
    Tuning,
    choose_tuning,
    experts,
    grouped,
    router_logits,
    sort_by_expert,
)
from penstock.kernels.quantize.quantize import FP8, Matrix, Quantized, parts

SIZES = {"30B": (2048, 768), "235B": (4096, 1536)}
"""hidden size, size of an expert in the published Qwen3 with 128 experts"""
NUM_EXPERTS, TOP_K = 128, 8
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 8192)
NUM_CALLS = 4
"""with experts of their own"""
BANDWIDTH, FLOPS = 4.2e12, 750e12
"""of an H200, as can be reached"""
SWEEP = {
    16: [(16, 128, 2, 4), (16, 256, 2, 3), (32, 128, 4, 3), (32, 256, 4, 3), (64, 128, 4, 3)],
    32: [(32, 128, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3)],
    64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4)],
    128: [(64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3), (256, 64, 8, 4)],
}


class Layer(NamedTuple):
    """Random numbers."""

    norm_weight: Tensor
    router: Tensor
    gate_up: Matrix
    down: Matrix


def random_layer(hidden: int, size: int, is_fp8: bool) -> Layer:
    """On the GPU."""

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)

    def experts(*shape: int) -> Matrix:
        numbers = random(NUM_EXPERTS, *shape)
        if not is_fp8:
            return numbers
        return Quantized(
            (numbers * 50).to(FP8), torch.full((NUM_EXPERTS, shape[0]), 0.02, device="cuda")
        )

    gate_up, down = experts(2 * size, hidden), experts(hidden, size)
    return Layer(random(hidden) + 1, random(NUM_EXPERTS, hidden), gate_up, down)


def floor_us(layer: Layer, num_touched: float, num_tokens: int) -> tuple[float, float]:
    """Of reading the weights of so many experts, and of multiplying."""
    weights = [parts(one)[0] for one in (layer.gate_up, layer.down)]
    num_bytes = sum(one.nbytes for one in weights) / NUM_EXPERTS
    num_weights = sum(one.numel() for one in weights) / NUM_EXPERTS
    return (
        num_bytes * num_touched / BANDWIDTH * 1e6,
        2 * num_weights * num_tokens * TOP_K / FLOPS * 1e6,
    )


def measure(layer: Layer, num_tokens: int, sweep: bool) -> None:
    """Prints a line, or one for each cut."""
    hidden, size = layer.down.shape[1:]
    xs = list(torch.randn(NUM_CALLS, num_tokens, hidden).cuda().bfloat16())
    logits = [router_logits(x, layer.router) for x in xs]
    is_fp8 = isinstance(layer.down, Quantized)
    tuning = choose_tuning(num_tokens * TOP_K, NUM_EXPERTS, size, is_fp8)
    weights = (layer.gate_up, layer.down)
    layers = [
        partial(
            norm_moe,
            x,
            layer.norm_weight,
            1e-6,
            layer.router,
            *weights,
            top_k=TOP_K,
            normalize=True,
        )
        for x in xs
    ]
    without_router = [
        partial(experts, x, scores, *weights, top_k=TOP_K, normalize=True)
        for x, scores in zip(xs, logits, strict=True)
    ]
    num_touched = sum(len(set(one.topk(TOP_K).indices.flatten().tolist())) for one in logits)
    touched = num_touched / NUM_CALLS
    reading, multiplying = floor_us(layer, touched, num_tokens)
    times = [graph_us(layers), graph_us(without_router), *products_us(layer, xs, logits, tuning)]
    floors = f"{reading:8.1f} | {multiplying:8.1f}"
    figures = " | ".join(f"{time:8.1f}" for time in times)
    print(f"| {num_tokens} | {touched:.0f} | {floors} | {figures} | {tuning.bm} |", flush=True)
    if sweep:
        for bm, cut in itertools.product(SWEEP, range(5)):
            if bm / 4 <= tuning.bm <= bm * 4 and cut < len(SWEEP[bm]):
                one = Cut(*SWEEP[bm][cut])
                try:
                    products = products_us(layer, xs, logits, Tuning(bm, one, one))
                except TritonError:
                    continue  # needs too much shared memory
                print(f"    {bm} {tuple(one)}: {products[0]:.1f} {products[1]:.1f}", flush=True)


def products_us(
    layer: Layer, xs: list[Tensor], logits: list[Tensor], tuning: Tuning
) -> tuple[float, float]:
    """Of gate and up, and of down."""
    routings = [sort_by_expert(one, TOP_K, True, 0, NUM_EXPERTS, tuning.bm) for one in logits]

    def gate_up(x: Tensor, routing: Routing) -> Tensor:
        return grouped(x, routing, layer.gate_up, True, tuning.bm, tuning.gate_up)

    def down(activated: Tensor, routing: Routing) -> Tensor:
        return grouped(activated, routing, layer.down, False, tuning.bm, tuning.down)

    pairs = list(zip(xs, routings, strict=True))
    activated = [gate_up(*pair) for pair in pairs]
    ups: list[Callable[[], object]] = [partial(gate_up, *pair) for pair in pairs]
    downs = [partial(down, *pair) for pair in zip(activated, routings, strict=True)]
    return graph_us(ups), graph_us(downs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="30B")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every expert")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--dtype", choices=["bfloat16", "fp8"], default="bfloat16")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    hidden, size = SIZES[arguments.size]
    layer = random_layer(hidden, size // arguments.tp, arguments.dtype == "fp8")
    print("| tokens | experts | read | multiply | layer | no router | gate, up | down | bm |")
    print("| --: | --: | --: | --: | --: | --: | --: | --: | --: |", flush=True)
    for num_tokens in arguments.tokens:
        measure(layer, num_tokens, arguments.sweep)


if __name__ == "__main__":
    main()
