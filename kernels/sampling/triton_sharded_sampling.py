"""Sampling from logits of which every rank of a tensor-parallel group has a part.

No rank ever has them all. Each one scans its part, into a buffer that its peers can read; behind a
barrier every rank finishes every row with what it reads from the others, a few numbers for each run
of 4096 token ids and, of rows that are restricted, the likely groups of 32 logits. All compute the
same tokens: those of `penstock.kernels.sampling.triton_sampling.sample`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.kernels.collectives.triton_shards import Shards, distances_to
from penstock.kernels.sampling.sampling import shard_size
from penstock.kernels.sampling.triton_gumbel import RUN
from penstock.kernels.sampling.triton_sampling import Runs, finish_rows, scan_runs
from penstock.kernels.sampling.triton_top_k_top_p import GROUPS_PER_RUN


def buffer_size(max_rows: int, vocab_size: int, num_ranks: int) -> int:
    """float32 elements of the buffer of each rank."""
    return sum(_sizes(max_rows, shard_size(vocab_size, num_ranks)))


class ShardedSampler:
    """One rank's, with its buffer: it samples from the logits that all ranks have put there."""

    def __init__(
        self, buffer: Tensor, addresses: Sequence[int], rank: int, max_rows: int, vocab_size: int
    ) -> None:
        """buffer: this rank's, float32 [buffer_size(...)]; addresses: of the buffers of all ranks,
        as this rank's device reaches them. Raises ValueError.
        """
        shard = shard_size(vocab_size, len(addresses))
        sizes = _sizes(max_rows, shard)
        if buffer.dtype != torch.float32 or list(buffer.shape) != [sum(sizes)]:
            given = f"{buffer.dtype} {list(buffer.shape)}"
            raise ValueError(f"the buffer is {given}; float32 [{sum(sizes)}] is needed")
        logits, group_max, best, total, token = torch.split(buffer, sizes)
        self._logits = logits.view(max_rows, shard)
        self._runs = Runs(best, total, token.view(torch.int32), group_max)
        self._vocab_size = vocab_size
        distances = distances_to(addresses, rank, buffer.device)
        self._shards = Shards(shard // RUN.value, len(addresses), rank, distances)

    def logits(self, num_rows: int) -> Tensor:
        """Where this rank's logits belong: [num_rows, shard_size(...)].

        They are those of the token ids from rank * shard_size(...) on; none beyond the vocabulary
        is read.
        """
        return self._logits[:num_rows]

    def sample(
        self,
        barrier: Callable[[], object],
        slots: Tensor,
        positions: Tensor,
        seeds: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        last_token: Tensor,
    ) -> Tensor:
        """As `penstock.kernels.sampling.sampling.sample`, for the logits of the first rows.

        All ranks call it with equal arguments. barrier: launches what lets a rank go on only when
        all ranks have come there, and what they wrote before can be read. Another barrier, or
        anything for which ranks wait for one another, must lie between this and the next write to
        `logits`: peers may still read them. Raises ValueError.
        """
        num_rows = len(slots)
        if num_rows > len(self._logits):
            raise ValueError(f"{num_rows} rows; the buffer has room for {len(self._logits)}")
        if not num_rows:
            return slots.new_empty(0)
        rows = (self._logits, self._logits.stride(0), slots, positions)
        arguments = (*rows, seeds, temperature, top_k, top_p, min_p, *self._runs)
        scan_runs(arguments, self._vocab_size, self._shards)
        barrier()
        return finish_rows(arguments, last_token, self._vocab_size, self._shards)


def _sizes(max_rows: int, shard: int) -> list[int]:
    """Elements of the arrays of a buffer: logits, largest of the groups, three for each run."""
    num_runs = shard // RUN.value
    return [max_rows * size for size in (shard, num_runs * GROUPS_PER_RUN.value, *[num_runs] * 3)]
