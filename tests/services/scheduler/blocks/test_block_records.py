"""Records of blocks."""

import pytest

from penstock.services.scheduler.blocks.block_records import HASH_BYTES, BlockRecords, Content
from tests.services.scheduler.mortal_records import Life, MortalRecords, SchedulerDiedError


def test_content_is_recorded_once() -> None:
    life, memory = Life(), bytearray(BlockRecords.size_of(2, 1))
    records = MortalRecords(memory, 2, 1, life=life)
    content = Content(1, 0, bytes(HASH_BYTES), bytes(4))
    records.write(1, content)
    life.num_stores = 0
    records.write(1, content)
    with pytest.raises(SchedulerDiedError):
        records.write(0, content)
