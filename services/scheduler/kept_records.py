"""Management of KV blocks with their records, in memory that the supervisor keeps."""

from penstock.protocol.config import Config
from penstock.protocol.transport.kept_memory import MemoryClient
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.block_pool import BlockPool
from penstock.services.scheduler.block_records import BlockRecords


def make_block_manager(
    config: Config, num_blocks: int, block_size: int, records: BlockRecords | None = None
) -> BlockManager:
    """Return the manager of `num_blocks` blocks, as configured; records: as in `BlockPool`."""
    pool = BlockPool(num_blocks, records=records)
    watermark = int(num_blocks * config.watermark)
    return BlockManager(pool, block_size, watermark, config.enable_prefix_caching)


def open_records(
    replica: int, num_blocks: int, block_size: int, memory: int
) -> BlockRecords | None:
    """Return the records of the last scheduler of a replica, or empty ones; memory: as in `begin`.

    Return None where the supervisor keeps no memory.
    """
    client = MemoryClient.from_environment()
    if client is None:
        return None
    size = num_blocks, block_size
    kept = client.open(f"blocks.{replica}", BlockRecords.size_of(*size), repr(size).encode())
    records = BlockRecords(kept, *size)
    records.begin(memory)
    return records
