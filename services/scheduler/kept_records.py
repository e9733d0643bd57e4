"""Records of KV blocks in memory that the supervisor keeps."""

from penstock.protocol.transport.kept_memory import MemoryClient
from penstock.services.scheduler.block_records import BlockRecords


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
