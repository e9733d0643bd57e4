"""The rate of a copy on the GPU, with which kernels that move memory are compared."""

import torch

from penstock.kernels.bench.timing import graph_us


def copy_rate() -> float:
    """Return bytes per microsecond that a copy kernel reads and writes."""
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    # A graph runs a copy on the copy engine, which is slower.
    return 2 * source.nbytes / graph_us([lambda: torch.neg(source, out=target)], 3, 1000.0)
