"""The memory that outlives a scheduler: records of blocks and of host slots."""

from penstock.protocol.config import Config
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.block_records import BlockRecords
from penstock.services.scheduler.blocks.offload_index import FolderIndex, OffloadIndex
from penstock.services.scheduler.scheduler import Scheduler
from tests.services.scheduler.mortal_records import Life, MortalRecords


class PersistentTables:
    """Records that schedulers make, one after the other; some die while they write."""

    def __init__(
        self,
        config: Config,
        num_blocks: int,
        num_slots: int,
        num_state_blocks: int,
        num_pieces: int,
    ) -> None:
        """With `kv_offload_folder`, there are files, too."""
        self._config, self._num_slots, self._num_pieces = config, num_slots, num_pieces
        self._of_blocks = num_blocks, config.block_size
        self._of_slots = num_slots, 0
        self._of_states = num_state_blocks, 0
        self._blocks = bytearray(BlockRecords.size_of(*self._of_blocks))
        self._slots = bytearray(BlockRecords.size_of(*self._of_slots))
        self._states = bytearray(BlockRecords.size_of(*self._of_states))

    def pool(self, kv: int, life: Life) -> BlockPool:
        """Return a pool over blocks of the memory `kv`."""
        records = MortalRecords(self._blocks, *self._of_blocks, life=life)
        records.begin(kv)
        return BlockPool(self._of_blocks[0], records)

    def state_pool(self, kv: int, life: Life) -> BlockPool | None:
        """Return a pool over state blocks of the memory `kv`, if there are some."""
        number, _ = self._of_states
        if not number:
            return None
        records = MortalRecords(self._states, *self._of_states, life=life)
        records.begin(kv)
        return BlockPool(number, records)

    def use_host(self, scheduler: Scheduler, kv: int, life: Life) -> None:
        """Let a scheduler use the host tier of its workers, which is as old as their blocks."""
        if not self._num_slots or not self._config.enable_prefix_caching:
            return
        offload = scheduler.block_manager.offload
        if offload is None or offload.memory_id != kv:
            records = MortalRecords(self._slots, *self._of_slots, life=life)
            records.begin(kv)
            per_step = max(1, self._config.max_num_batched_tokens // self._config.block_size)
            offload = OffloadIndex(self._num_slots, per_step, kv, records, self._num_pieces)
        scheduler.block_manager.use_offload(offload)
        if self._config.kv_offload_folder:
            offload.use_folder(FolderIndex(scheduler.epoch, 1))
