"""The index of host slots: what it finds, forgets and records."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.worker import CopyBlocks, FolderReport
from penstock.services.scheduler.blocks.block_records import HASH_BYTES, BlockRecords
from penstock.services.scheduler.blocks.offload_index import FolderIndex, OffloadIndex
from tests.services.scheduler.packed_plans import pairs

A, B, C = (bytes([n]) * HASH_BYTES for n in range(3))


def make_index(num_slots: int, memory: bytearray | None = None) -> OffloadIndex:
    sizes = num_slots, 0
    records = BlockRecords(memory or bytearray(BlockRecords.size_of(*sizes)), *sizes)
    records.begin(1)
    return OffloadIndex(num_slots, 2, 1, records)


def successor(index: OffloadIndex) -> OffloadIndex:
    """Return the index of the next scheduler, which has the records only."""
    assert index._records
    return OffloadIndex(index.num_slots, 2, 1, index._records)


def plan(index: OffloadIndex, number: int) -> CopyBlocks:
    copies = index.flush(1, number)
    assert copies
    return copies


def test_a_copy_is_recorded_when_its_plan_is_confirmed() -> None:
    index = make_index(2)
    index.store(7, A)
    assert pairs(plan(index, 0).blocking) == [(7, index._entries[A].slot)]
    assert successor(index).find([A]) == []
    index.confirm(0)
    assert successor(index).find([A]) == [A]


def test_a_copy_that_overlaps_a_step_is_certain_after_the_next_one() -> None:
    index = make_index(2)
    index.store(7, A, overlapped=True)
    assert len(plan(index, 0).overlapped) == 8
    index.confirm(0)
    assert successor(index).find([A]) == []
    index.confirm(1)
    assert successor(index).find([A]) == [A]


def test_a_slot_has_no_record_while_it_is_overwritten() -> None:
    index = make_index(1)
    index.store(7, A)
    plan(index, 0)
    index.confirm(0)
    index.store(8, B)
    assert (index.find([A]), index.find([B])) == ([], [B])
    assert successor(index).num_blocks == 0


def test_a_confirmation_is_of_one_copy_and_not_of_a_later_one_of_the_same_block() -> None:
    index = make_index(1)
    for number, hash_ in enumerate((A, B, A)):
        index.store(number, hash_)
        plan(index, number)
    index.confirm(0)
    assert successor(index).num_blocks == 0
    index.confirm(2)
    assert successor(index).find([A]) == [A]


def test_a_death_voids_copies_in_flight_and_no_others() -> None:
    index = make_index(4)
    index.store(1, A)
    plan(index, 0)
    index.store(2, B, overlapped=True)
    plan(index, 1)
    index.store(3, C)
    index.confirm(1)
    index.lose()
    assert (index.find([A]), index.find([B]), index.find([C])) == ([A], [], [])
    assert index.flush(2, 0) is None


def test_loads_keep_their_slots() -> None:
    index = make_index(2)
    for block, hash_ in enumerate((A, B)):
        index.store(block, hash_)
    index.pin([A, B])
    index.store(5, C)
    assert index.find([C]) == []
    assert index.is_loading(A)
    index.load(A, 6, overlapped=False)
    index.load(B, 7, overlapped=True)
    copies = plan(index, 0)
    assert [(block, slot < 0) for block, slot in pairs(copies.blocking)][-1] == (6, True)
    assert [(block, slot < 0) for block, slot in pairs(copies.overlapped)] == [(7, True)]
    index.store(5, C)
    assert index.find([C]) == [C]
    assert not index.is_loading(A)


def test_content_that_may_be_wrong_is_forgotten() -> None:
    index = make_index(2)
    index.store(1, A)
    plan(index, 0)
    index.confirm(0)
    index.discard([A, B])
    assert successor(index).num_blocks == index.num_blocks == 0


def test_a_file_that_is_discarded_while_it_is_read_is_not_used() -> None:
    index = make_index(2)
    index.use_folder(FolderIndex(1, num_ranks=1))
    index.on_report(FolderReport(1, 0, added=[A, B]))
    assert index.fetch([A, B])
    index.discard([A])
    index.on_report(FolderReport(1, 0, fetched=[A, B]))
    assert index.find([B]) == [B]
    assert index.find([A]) == []
    assert index._free


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=60))
def test_keeps_the_content_used_last(num_slots: int, used: list[int]) -> None:
    index = make_index(num_slots)
    newest: list[int] = []
    for number, one in enumerate(used):
        index.store(number, bytes([one]) * HASH_BYTES)
        newest = [one, *(other for other in newest if other != one)][:num_slots]
        index.flush(1, number)
        index.confirm(number)
    hashes = {bytes([one]) * HASH_BYTES for one in newest}
    assert set(index._entries) == hashes
    assert set(successor(index)._entries) == hashes
