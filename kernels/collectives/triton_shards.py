"""A vocabulary that is cut between the ranks of a tensor-parallel group, at multiples of a run.

Every rank has a buffer of its own with its logits and what is known of its runs. All buffers are
laid out alike, and peers may read them: an element of another rank's part is as far from the own
one as that rank's buffer is from the own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Shards(NamedTuple):
    """Where the parts of the vocabulary are, seen from one rank."""

    runs_per_shard: int
    """of every rank but the last ones, which may have fewer or none"""
    num_shards: int = 1
    rank: int = 0
    distances: Tensor | None = None
    """int64 [num_shards]: from this rank's buffer to those of all ranks, in units of 4 bytes"""


def distances_to(addresses: Sequence[int], rank: int, device: torch.device) -> Tensor:
    """`Shards.distances`, where the buffers of all ranks have these addresses. Raises ValueError.

    As this rank's device reaches them. Loads of 16 bytes are made from them.
    """
    if wrong := [address for address in addresses if address % 16]:
        raise ValueError(f"a buffer at {wrong[0]:#x}; its address must divide by 16")
    distances = [(address - addresses[rank]) // 4 for address in addresses]
    return torch.tensor(distances, dtype=torch.int64, device=device)


@triton.jit
def shift(index, shards, per_run: tl.constexpr):
    """What to add to an index into a row of an array, to get the element at the rank that has it.

    shards: distances, runs a shard, number of shards; per_run: elements of the array for each run.
    """
    moved = index * 0
    if shards[2] > 1:
        shard = tl.minimum(index // (shards[1] * per_run), shards[2] - 1)
        # Buffers are aligned to 16 bytes: loads are then as wide as those from one buffer.
        distance = tl.multiple_of(tl.load(shards[0] + shard), 4)
        moved = distance - shard * (shards[1] * per_run)
    return moved
