"""The words of packed integers on GPUs, as `penstock.kernels.packed.matrices` describes them."""

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 128  # columns of a row whose words are adjacent
ZERO_BITS = 255  # the lowest bits of a scale in float32, 0 in every number of float16 and bfloat16


class PackedTensors(Protocol):
    """Packed matrices [..., num_rows, num_columns], as kernels read them: `Packed`."""

    @property
    def words(self) -> Tensor:
        """int32 [..., blocks, num_rows, 4 * bits]; the last block is padded."""

    @property
    def groups(self) -> Tensor:
        """int32 [..., groups, num_rows]: scale and zero point from `pack_groups`."""

    @property
    def order(self) -> Tensor | None:
        """int32 [..., num_columns]: the matrix's column of each packed column; None: in order."""

    @property
    def num_columns(self) -> int: ...

    @property
    def group_size(self) -> int:
        """Packed columns that share a scale."""

    @property
    def bits(self) -> int: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int: ...
