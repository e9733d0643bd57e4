"""Factories of the scheduler, with its records of KV blocks and host slots in persistent memory."""

import logging

from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.config import Config
from penstock.protocol.transport.socket_pairs import MemoryClient
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.block_records import BlockRecords, hash_block, hash_root
from penstock.services.scheduler.blocks.folder_index import FolderIndex
from penstock.services.scheduler.blocks.offload_index import OffloadIndex
from penstock.services.scheduler.peers.worker_recovery import RecoverableScheduler
from penstock.services.scheduler.peers.workers import WorkerGroup

log = logging.getLogger(__name__)


def make_block_manager(
    config: Config, num_blocks: int, block_size: int, records: BlockRecords | None = None
) -> BlockManager:
    """Return the manager of `num_blocks` blocks, as configured; records: as in `BlockPool`."""
    pool = BlockPool(num_blocks, records=records)
    watermark = int(num_blocks * config.watermark)
    return BlockManager(pool, block_size, watermark, config.enable_prefix_caching)


def make_scheduler(
    config: Config, model: ModelConfig, replica: int, group: WorkerGroup
) -> RecoverableScheduler:
    """Return a scheduler for a group that is ready, with what its predecessor has recorded."""
    size = group.num_blocks, group.block_size
    records = open_records(f"blocks.{replica}", *size, group.memory_id)
    blocks = make_block_manager(config, *size, records)
    length = model.context(config.max_model_len)
    return RecoverableScheduler(config, length, blocks, group.epoch)


def open_records(
    name: str, num_blocks: int, block_size: int, memory_id: int
) -> BlockRecords | None:
    """Return the records of the last scheduler, or empty ones; memory_id: as in `begin`.

    Return None where memory can't be persistent.
    """
    client = MemoryClient.from_environment()
    if client is None:
        return None
    size = num_blocks, block_size
    layout = repr((*size, hash_block(hash_root(""), b"")))  # other hashes: other records
    try:
        memory = client.open(name, BlockRecords.size_of(*size), layout.encode())
    except OSError as error:
        log.warning("%s: records end with the scheduler: %s", name, error)
        return None
    records = BlockRecords(memory, *size)
    records.begin(memory_id)
    return records


def use_host_tier(
    scheduler: RecoverableScheduler, config: Config, replica: int, group: WorkerGroup
) -> None:
    """Use the host tier of a group that is ready, if all of its workers have one by now."""
    num_slots, memory_id = group.host_tier
    offload, pool = scheduler.offload, scheduler.block_manager.pool
    if not num_slots or not config.enable_prefix_caching:
        scheduler.use_offload(None)
    elif offload is None or offload.memory_id != memory_id:
        if offload and offload.num_blocks:
            log.warning("host tier: its %d blocks ended with the workers", offload.num_blocks)
        records = open_records(f"slots.{replica}", num_slots, 0, memory_id)
        per_step = max(1, config.max_num_batched_tokens // scheduler.block_manager.block_size)
        offload = OffloadIndex(num_slots, per_step, memory_id, records)
        scheduler.use_offload(offload)
        log.info("host tier: %d blocks, %d of them in use", num_slots, offload.num_blocks)
    elif pool.offload is None:
        scheduler.use_offload(offload)
    is_listed = offload and offload.folder and offload.folder.epoch == group.epoch
    if config.kv_offload_folder and pool.offload and not is_listed:
        pool.offload.use_folder(FolderIndex(group.epoch, config.tp))
