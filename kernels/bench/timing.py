"""Times of GPU work in replays of a CUDA graph, and the choice of the fastest tile sizes."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.kernels.linear.tile_sizes import GemmConfig, GemmShape


def l2_bytes() -> int:
    """Return a number of bytes larger than the GPU's L2; measurements rotate over more data."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return max(64 << 20, int(found.L2_cache_size) * 5 // 4)


def graph_us(work: Sequence[Callable[[], object]], repeats: int = 5, min_us: float = 2000) -> float:
    """Return the microseconds of one call, the median of `repeats` measurements.

    work: calls with different data. All data together exceeds `l2_bytes`, so that caches are not
    measured.
    """
    for call in work:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    once = _replay_us(graph, 1)
    num_replays = max(1, round(min_us / max(once, 1)))
    times = [_replay_us(graph, num_replays) for _ in range(repeats)]
    return statistics.median(times) / (num_replays * len(work))


def _replay_us(graph: torch.cuda.CUDAGraph, num_replays: int) -> float:
    begin, end = _event(), _event()
    begin.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


Configs = dict[GemmShape, GemmConfig | None]
FINALISTS = 3  # number of candidates that are measured again, for longer
ROUNDS = 2


def fastest_in_turn(
    shapes: Sequence[GemmShape],
    right: Callable[[GemmShape], Sequence[GemmConfig]],
    us: Callable[[Configs], float],
) -> tuple[Configs, float, float]:
    """Tune the products in turn, each with the best tile sizes so far; None stands for cuBLAS.

    right: returns the candidates that compute the right result. us: returns the microseconds of all
    products with these tile sizes. Returns the tile sizes, the time of cuBLAS alone and the time of
    the result.
    """
    configs: Configs = dict.fromkeys(shapes)
    found: dict[GemmShape, Sequence[GemmConfig]] = {}
    separate = best = us(configs)
    for shape in [*shapes] * ROUNDS:
        if shape not in found:
            found[shape] = right(shape)
        times = {config: us(configs | {shape: config}) for config in found[shape]}
        for config in sorted(times, key=lambda config: times[config])[:FINALISTS]:
            again = min(us(configs | {shape: config}) for _ in range(2))
            if again < best:
                best, configs[shape] = again, config
    return configs, separate, best
