"""Choice of the fastest tile sizes by measurements, whichever clock takes them."""

from collections.abc import Callable, Sequence

from penstock.kernels.linear.gemm_candidates import GemmShape
from penstock.kernels.linear.gemm_config import GemmConfig

Configs = dict[GemmShape, GemmConfig | None]
FINALISTS = 3  # candidates that are measured again, for longer
ROUNDS = 2


def fastest_in_turn(
    shapes: Sequence[GemmShape],
    right: Callable[[GemmShape], Sequence[GemmConfig]],
    us: Callable[[Configs], float],
) -> tuple[Configs, float, float]:
    """Tune the products in turn, each among the best so far; None: cuBLAS is faster.

    right: the candidates whose result is right. us: microseconds of all products with these tile
    sizes. Returns the tile sizes, and the times of cuBLAS alone and of the result.
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
