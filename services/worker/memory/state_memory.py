"""Size and places of a rank's state blocks: the recurrent state of sequences.

State blocks lie in the memory of the KV cache, so that both kinds have one budget: a state block
takes the place of some KV blocks that follow each other (`Architecture.pack_states`). The KV cache
stays as it is, and the parts of all state blocks are equally far apart.
"""

import logging
from math import lcm, prod
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.layouts.states import MAX_STATE_BLOCKS, States
from penstock.models.architecture import Packing, Ranks
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import MAX_BLOCKS, STATE_CHUNK
from penstock.services.worker.memory.kv_cache import KVLayout, KVMemory

log = logging.getLogger(__name__)
BLOCKS_PER_ROW = 3  # beside a given number of KV blocks: two of a running sequence, a checkpoint
MIN_PLACES = 3  # two state blocks and the KV blocks of a sequence
POSITION_BYTES = 2 * torch.int32.itemsize  # of a state block


class StateLayout(NamedTuple):
    """The layout of a rank's KV blocks and state blocks in one memory.

    There are no state blocks without recurrent state. The last one takes padded rows' writes.
    """

    kv: KVLayout
    num_rows: int  # maximum number of running sequences
    is_shared: bool  # whether each place may have a state or KV; otherwise states follow the KV

    @property
    def _packing(self) -> Packing:
        plane_bytes = prod(self.kv.block_shape) * self.kv.dtype.itemsize
        return self.kv.architecture.pack_states(Ranks(self.kv.tp_size), plane_bytes)

    @property
    def blocks_per_state(self) -> int:
        """Number of KV blocks in whose place a state block lies; 0 without recurrent state."""
        return self._packing.num_blocks if self.kv.architecture.state_layers else 0

    def num_states(self, num_blocks: int) -> int:
        """Return the number of state blocks for a number of KV blocks."""
        size = self.blocks_per_state
        fitting = num_blocks // max(size, 1) if self.is_shared else BLOCKS_PER_ROW * self.num_rows
        return min(fitting, MAX_STATE_BLOCKS) if size else 0

    def _num_before(self, num_blocks: int) -> int:
        """Return the number of places before the first state block."""
        return 0 if self.is_shared else -(-num_blocks // self.blocks_per_state)

    def num_allocated(self, num_blocks: int) -> int:
        """Return the number of KV blocks in the memory, with those in whose places are states."""
        if not (size := self.blocks_per_state):
            return num_blocks
        return (self._num_before(num_blocks) + self.num_states(num_blocks) + 1) * size

    def num_bytes(self, num_blocks: int) -> int:
        """Return the size of the memory."""
        positions = self.num_states(num_blocks) + 1 if self.blocks_per_state else 0
        return self.num_allocated(num_blocks) * self.kv.block_bytes + positions * POSITION_BYTES

    def num_fitting_blocks(self, num_bytes: float) -> int:
        """Return the number of KV blocks that fit into `num_bytes`.

        Raises ModelError if not even a single sequence could run.
        """
        if not (size := self.blocks_per_state):
            return self.kv.num_fitting_blocks(num_bytes)
        place_bytes = size * self.kv.block_bytes + POSITION_BYTES
        places = min(int(num_bytes / place_bytes) - 1, MAX_STATE_BLOCKS, MAX_BLOCKS // size)
        if places < MIN_PLACES:
            least = (MIN_PLACES + 1) * place_bytes / 2**30
            raise ModelError(
                f"KV cache and recurrent state: got {num_bytes / 2**30:.3g} GiB, expected "
                f"{least:.3g} or more for one sequence; raise --gpu-memory-utilization or "
                "--kv-cache-gib, or use more GPUs"
            )
        return places * size

    def allocate(self, num_blocks: int, kv: KVMemory, memory: Tensor) -> States | None:
        """Return the state blocks in the memory of `kv`, if there are any."""
        if not (size := self.blocks_per_state):
            return None
        first, number = self._num_before(num_blocks), self.num_states(num_blocks) + 1
        tokens = size * self.kv.block_size
        log.info("recurrent state: %d state blocks, each in place of %d tokens", number - 1, tokens)
        planes = kv.values.view(torch.uint8).flatten(3).flatten(0, 1)
        rows = planes.view(len(planes), -1, size * planes.shape[2])[:, first:]
        places, ranks = iter(self._packing.places), Ranks(self.kv.tp_size)

        def place(shape: tuple[int, ...]) -> Tensor:
            plane, begin = next(places)
            part = rows[plane, :, begin : begin + 4 * prod(shape)]
            return part.view(torch.float32).view(number, *shape)

        layers = [
            [place(state.shape_of_rank(ranks)) for state in layer.state]
            for layer in self.kv.architecture.state_layers
        ]
        positions = memory[-number * POSITION_BYTES :].view(torch.int32).view(number, 2)
        return States(positions, layers)


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
