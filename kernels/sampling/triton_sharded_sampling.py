"""Sampling from logits that are sharded over the ranks of a tensor-parallel group.

Each rank scans its shard into a buffer that its peers can read. After a barrier every rank finishes
every row. From its peers it reads a few numbers for each run of 4096 token ids. For restricted rows
it also reads the likely groups of 32 logits. All ranks compute the same tokens as
`penstock.kernels.sampling.triton_sampling.sample`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import SamplingTensors, shard_size
from penstock.kernels.sampling.triton_gumbel import RUN
from penstock.kernels.sampling.triton_sampling import Runs, finish_rows, scan_runs
from penstock.kernels.sampling.triton_top_k_top_p import GROUPS_PER_RUN
from penstock.kernels.triton_collectives import Shards, distances_to


def buffer_size(max_rows: int, vocab_size: int, num_ranks: int) -> int:
    """Return the number of float32 elements of each rank's buffer."""
    return sum(_sizes(max_rows, shard_size(vocab_size, num_ranks)))


class ShardedSampler:
    """Sampler of one rank, with a buffer for its shard of the logits."""

    def __init__(
        self, buffer: Tensor, addresses: Sequence[int], rank: int, max_rows: int, vocab_size: int
    ) -> None:
        """Divide this rank's buffer, float32 [buffer_size(...)], into arrays. Raises ValueError.

        addresses: addresses of all ranks' buffers, as seen by this rank's device.
        """
        shard = shard_size(vocab_size, len(addresses))
        sizes = _sizes(max_rows, shard)
        if buffer.dtype != torch.float32 or list(buffer.shape) != [sum(sizes)]:
            given = f"{buffer.dtype} {list(buffer.shape)}"
            raise ValueError(f"buffer: got {given}, expected torch.float32 [{sum(sizes)}]")
        logits, group_max, best, total, token = torch.split(buffer, sizes)
        self._logits = logits.view(max_rows, shard)
        self._runs = Runs(best, total, token.view(torch.int32), group_max)
        self._vocab_size = vocab_size
        distances = distances_to(addresses, rank, buffer.device)
        self._shards = Shards(shard // RUN.value, len(addresses), rank, distances)

    def logits(self, num_rows: int) -> Tensor:
        """Return the memory of this rank's logits: [num_rows, shard_size(...)].

        The first logit belongs to token id rank * shard_size(...). Logits beyond the vocabulary are
        not read.
        """
        return self._logits[:num_rows]

    def sample(
        self,
        barrier: Callable[[], object],
        slots: Tensor,
        positions: Tensor,
        by_slot: SamplingTensors,
    ) -> Tensor:
        """Compute `penstock.kernels.sampling.sampling.sample` for the logits of the first rows.

        All ranks call this method with equal arguments. barrier: launches a barrier of all ranks,
        after which their earlier writes can be read. Another barrier or collective must precede the
        next write to `logits`, because peers may still read them. Raises ValueError.
        """
        num_rows = len(slots)
        if num_rows > len(self._logits):
            raise ValueError(f"slots: got {num_rows} rows, expected at most {len(self._logits)}")
        if not num_rows:
            return slots.new_empty(0)
        rows = (self._logits, self._logits.stride(0), slots, positions)
        arguments = (*rows, by_slot.parameters, *self._runs)
        scan_runs(arguments, self._vocab_size, self._shards)
        barrier()
        return finish_rows(arguments, by_slot.last_token, self._vocab_size, self._shards)


def _sizes(max_rows: int, shard: int) -> list[int]:
    """Return the sizes of a buffer's arrays: logits, maxima of groups, three values of each run."""
    num_runs = shard // RUN.value
    return [max_rows * size for size in (shard, num_runs * GROUPS_PER_RUN.value, *[num_runs] * 3)]
