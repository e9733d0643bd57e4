"""Time of a mixture of experts, and of reading the weights of the chosen experts.

    python -m tests.gpu.moe [--size 30B] [--tp 1] [--dtype fp8] [--tokens 1 16 64]

Prints microseconds: lower bounds for reading the chosen experts' weights and for multiplying, then
the times of a layer, of a layer without router and norm, and of each product. The tokens' experts
are random, and differ in every call.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.bench.timing import graph_us
from penstock.kernels.matrices import FP8, Quantized, Rows, parts
from penstock.kernels.moe import norm_moe
from penstock.kernels.triton_moe import (
    MoeTuning,
    Routing,
    choose_tuning,
    experts,
    grouped,
    router_logits,
    sort_by_expert,
    tuning_of_one,
)

SIZES = {"30B": (2048, 768), "235B": (4096, 1536)}
"""hidden size, size of an expert in the published Qwen3 with 128 experts"""
NUM_EXPERTS, TOP_K = 128, 8
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 8192)
NUM_CALLS = 4
"""calls with different experts"""
BANDWIDTH, FLOPS = 4.2e12, 750e12
"""reachable rates of an H200"""


class MoeLayer(NamedTuple):
    """Random weights of a layer."""

    norm_weight: Tensor
    router: Tensor
    gate_up: Rows
    down: Rows


def random_layer(hidden: int, size: int, is_fp8: bool) -> MoeLayer:
    """Return a layer on the GPU."""

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)

    def experts(*shape: int) -> Rows:
        numbers = random(NUM_EXPERTS, *shape)
        if not is_fp8:
            return numbers
        return Quantized(
            (numbers * 50).to(FP8), torch.full((NUM_EXPERTS, shape[0]), 0.02, device="cuda")
        )

    gate_up, down = experts(2 * size, hidden), experts(hidden, size)
    return MoeLayer(random(hidden) + 1, random(NUM_EXPERTS, hidden), gate_up, down)


def floor_us(layer: MoeLayer, num_touched: float, num_tokens: int) -> tuple[float, float]:
    """Return the lower bounds of reading `num_touched` experts and of multiplying."""
    weights = [parts(one)[0] for one in (layer.gate_up, layer.down)]
    num_bytes = sum(one.nbytes for one in weights) / NUM_EXPERTS
    num_weights = sum(one.numel() for one in weights) / NUM_EXPERTS
    return (
        num_bytes * num_touched / BANDWIDTH * 1e6,
        2 * num_weights * num_tokens * TOP_K / FLOPS * 1e6,
    )


def measure(layer: MoeLayer, num_tokens: int) -> None:
    """Print a line of the table."""
    hidden, size = layer.down.shape[1:]
    xs = list(torch.randn(NUM_CALLS, num_tokens, hidden).cuda().bfloat16())
    logits = [router_logits(x, layer.router) for x in xs]
    is_fp8 = isinstance(layer.down, Quantized)
    tuning = choose_tuning(num_tokens * TOP_K, NUM_EXPERTS, size, is_fp8)
    if num_tokens == 1 and not is_fp8:
        tuning = tuning_of_one(tuning, hidden)
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


def products_us(
    layer: MoeLayer, xs: list[Tensor], logits: list[Tensor], tuning: MoeTuning
) -> tuple[float, float]:
    """Return the times of gate and up, and of down."""
    routings = [sort_by_expert(one, TOP_K, True, 0, NUM_EXPERTS, tuning.bm) for one in logits]

    def gate_up(x: Tensor, routing: Routing) -> Tensor:
        return grouped(x, routing, layer.gate_up, True, tuning.gate_bm or tuning.bm, tuning.gate_up)

    def down(activated: Tensor, routing: Routing) -> Tensor:
        return grouped(activated, routing, layer.down, False, tuning.bm, tuning.down)

    pairs = list(zip(xs, routings, strict=True))
    activated = [gate_up(*pair) for pair in pairs]
    ups: list[Callable[[], object]] = [partial(gate_up, *pair) for pair in pairs]
    downs = [partial(down, *pair) for pair in zip(activated, routings, strict=True)]
    return graph_us(ups), graph_us(downs)


def main() -> None:
    """Measure a layer for the given numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="30B")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every expert")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--dtype", choices=["bfloat16", "fp8"], default="bfloat16")
    arguments = parser.parse_args()
    hidden, size = SIZES[arguments.size]
    layer = random_layer(hidden, size // arguments.tp, arguments.dtype == "fp8")
    print("| tokens | experts | read | multiply | layer | no router | gate, up | down | bm |")
    print("| --: | --: | --: | --: | --: | --: | --: | --: | --: |", flush=True)
    for num_tokens in arguments.tokens:
        measure(layer, num_tokens)


if __name__ == "__main__":
    main()
