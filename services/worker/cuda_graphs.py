"""Decode steps as CUDA graphs: one launch from embedding to sampled token."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.plan import APPENDED, HEADER, ROW

log = logging.getLogger(__name__)

PROGRESS = 10
"""graphs between two lines of the log"""
Decode = Callable[[Tensor, int], Tensor]
"""(record, number of rows) → tokens"""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Padded batches: 1, 2, 4, 8, then by 8 to 256, by 16 beyond."""
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 16, 16)]
    below = [size for size in steps if size < max_num_seqs]
    return [*below, max_num_seqs]


class CudaGraphs:
    """One graph for each padded batch; they share one memory pool, the largest comes first."""

    def __init__(
        self,
        decode: Decode,
        sizes: Iterable[int],
        device: torch.device,
        on_progress: Callable[[], None],
    ) -> None:
        self._sizes = sorted(sizes)
        self._record = torch.zeros(
            HEADER + self._sizes[-1] * (ROW + 4 * APPENDED), dtype=torch.int32, device=device
        )
        self._graphs: dict[int, Any] = {}
        self._tokens: dict[int, Tensor] = {}
        pool = None
        for size in reversed(self._sizes):
            decode(self._record, size)  # what is compiled or allocated once must not be captured
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._tokens[size] = decode(self._record, size)
            pool = pool or graph.pool()
            self._graphs[size] = graph
            on_progress()
            if len(self._graphs) % PROGRESS == 0:
                log.info("CUDA graphs: %d of %d", len(self._graphs), len(self._sizes))
        log.info("captured %d CUDA graphs, of 1 to %d rows", len(self._sizes), self._sizes[-1])

    def replay(self, record: Any, num_rows: int) -> Tensor | None:
        """Runs a step whose record is an int32 array; None where it fits into no graph.

        Returns the tokens, valid until the next replay of this size: int64 [padded rows].
        """
        if num_rows > self._sizes[-1] or len(record) > len(self._record):
            return None
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        source = torch.from_numpy(record).pin_memory()
        self._record[: len(record)].copy_(source, non_blocking=True)
        self._graphs[size].replay()
        return self._tokens[size]
