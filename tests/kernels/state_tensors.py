"""State blocks as a worker has them: the tensors of a layer share a memory, and are apart."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor


def state_tensors(
    num_blocks: int, shapes: Iterable[tuple[int, ...]], device: torch.device | None = None
) -> list[Tensor]:
    """Return float32 tensors [num_blocks, *shape], filled with NaN, in one memory."""
    shapes = list(shapes)
    sizes = [-(-prod(shape) // 128) * 128 for shape in shapes]
    memory = torch.full((num_blocks, sum(sizes)), torch.nan, device=device)
    parts = memory.split(sizes, 1)
    return [
        part[:, : prod(shape)].unflatten(1, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]
