"""A vocabulary that is sharded over the ranks of a tensor-parallel group, at multiples of a run.

Every rank has a buffer with its logits and results of its runs. All buffers have the same layout,
and peers may read them: an element of another rank's shard is offset by the distance of the two
ranks' buffers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Shards(NamedTuple):
    """Shards of the vocabulary as one rank addresses them."""

    runs_per_shard: int  # runs of every rank; the last ranks may have fewer or none
    num_shards: int = 1
    rank: int = 0
    # int64 [num_shards]: from this rank's buffer to each rank's buffer, in units of 4 bytes
    distances: Tensor | None = None


def distances_to(addresses: Sequence[int], rank: int, device: torch.device) -> Tensor:
    """Return `Shards.distances` from the addresses of all ranks' buffers. Raises ValueError.

    addresses: as this rank's device reaches them; kernels load 16 bytes at once.
    """
    if wrong := [address for address in addresses if address % 16]:
        raise ValueError(f"addresses: got {wrong[0]:#x}, expected a multiple of 16")
    distances = [(address - addresses[rank]) // 4 for address in addresses]
    return torch.tensor(distances, dtype=torch.int64, device=device)


@triton.jit
def shift(index, shards, per_run: tl.constexpr):
    """Return the offset from an index into a row of an array to the element at its rank.

    shards: distances, runs of a shard, number of shards. per_run: elements of the array per run.
    """
    moved = index * 0
    if shards[2] > 1:
        shard = tl.minimum(index // (shards[1] * per_run), shards[2] - 1)
        # Buffers are aligned to 16 bytes: loads are then as wide as from one buffer.
        distance = tl.multiple_of(tl.load(shards[0] + shard), 4)
        moved = distance - shard * (shards[1] * per_run)
    return moved
