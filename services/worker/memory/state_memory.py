"""Size and allocation of a rank's state blocks: the recurrent state of sequences."""

import logging
import math
from math import lcm, prod
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.layouts.states import MAX_STATE_BLOCKS, States
from penstock.models.architecture import Architecture, Ranks
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import STATE_CHUNK

log = logging.getLogger(__name__)
BLOCKS_PER_ROW = 3  # two for a running sequence, and one for a checkpoint
MAX_SHARE = 0.5  # of the memory for KV cache and state blocks
ALIGNMENT = 512  # bytes


class StateLayout(NamedTuple):
    """The layout of a rank's state blocks, of which there are none without recurrent state."""

    architecture: Architecture
    tp_size: int

    @property
    def block_bytes(self) -> int:
        """Size of a state block in bytes, in all layers and with its positions."""
        size = self.architecture.sequence_bytes(Ranks(self.tp_size))
        return size + 2 * torch.int32.itemsize if size else 0

    def num_fitting_blocks(self, num_rows: int, num_bytes: float) -> int:
        """Return the number of blocks for `num_rows`, in up to MAX_SHARE of `num_bytes`.

        num_bytes: infinite if the number of KV blocks is given.
        Raises ModelError if not even a single sequence could run.
        """
        if not self.block_bytes:
            return 0
        if num_bytes == math.inf:
            return min(BLOCKS_PER_ROW * num_rows, MAX_STATE_BLOCKS)
        fitting = int(MAX_SHARE * num_bytes / self.block_bytes) - 1
        if fitting < BLOCKS_PER_ROW:
            raise ModelError(
                f"recurrent state: got {num_bytes / 2**30:.2f} GiB, expected "
                f"{(BLOCKS_PER_ROW + 1) * self.block_bytes / MAX_SHARE / 2**30:.2f} or more for "
                "one sequence; raise --gpu-memory-utilization or --kv-cache-gib, or use more GPUs"
            )
        return min(BLOCKS_PER_ROW * num_rows, fitting, MAX_STATE_BLOCKS)

    def num_bytes(self, num_blocks: int) -> int:
        """Return the size of the memory for this number of blocks, and for padded rows."""
        return (num_blocks + 1) * self.block_bytes + ALIGNMENT if self.block_bytes else 0

    def allocate(self, num_blocks: int, memory: Tensor) -> States:
        """Return the state blocks in `memory`, uint8 [num_bytes], zeros or those of a last worker.

        A padded row writes to the last block.
        """
        log.info("recurrent state: %d blocks, %.2f GiB", num_blocks, len(memory) / 2**30)
        begin = -memory.data_ptr() % ALIGNMENT

        def view(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal begin
            end = begin + prod(shape) * dtype.itemsize
            part = memory[begin:end].view(dtype).view(shape)
            begin = end
            return part

        ranks = Ranks(self.tp_size)
        layers = [
            [
                view((num_blocks + 1, *state.shape_of_rank(ranks)), torch.float32)
                for state in layer.state
            ]
            for layer in self.architecture.state_layers
        ]
        return States(view((num_blocks + 1, 2), torch.int32), layers)


def check_step_size(config: Config, block_size: int) -> None:
    """Raise ModelError if the chunks of a prompt might not fit beside the rows that decode."""
    unit = lcm(STATE_CHUNK, block_size)
    least = config.max_num_seqs + unit
    if config.max_num_batched_tokens < least:
        raise ModelError(
            f"--max-num-batched-tokens: got {config.max_num_batched_tokens}, expected {least} or "
            f"more: --max-num-seqs, and {unit} for a chunk of a model with recurrent state"
        )


def kept_states(states: States) -> bytes:
    """Return `WorkerState.kept_states`."""
    return pack((states.positions[:-1].cpu() - 1).flatten().tolist())
