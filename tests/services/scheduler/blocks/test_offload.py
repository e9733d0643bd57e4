"""The host tier: its index, and a scheduler that uses it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.worker import CopyBlocks, FolderReport
from penstock.services.scheduler.blocks import state_blocks
from penstock.services.scheduler.blocks.block_records import HASH_BYTES, BlockRecords
from penstock.services.scheduler.blocks.offload_index import FolderIndex, OffloadIndex
from penstock.services.scheduler.sequence import Status
from tests.services.scheduler.builders import long_prompt, make_sequence
from tests.services.scheduler.packed_plans import pairs
from tests.services.scheduler.simulation import Simulation
from tests.services.scheduler.test_model import SchedulerMachine, simulations

# ---- The index of host slots: what it finds, forgets and records -----------------------------


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
    assert index.is_awaited(A)
    index.load(A, 6, overlapped=False)
    index.load(B, 7, overlapped=True)
    copies = plan(index, 0)
    assert [(block, slot < 0) for block, slot in pairs(copies.blocking)][-1] == (6, True)
    assert [(block, slot < 0) for block, slot in pairs(copies.overlapped)] == [(7, True)]
    index.store(5, C)
    assert index.find([C]) == [C]
    assert not index.is_awaited(A)


def test_a_prefix_is_awaited_until_its_last_block_is_loaded() -> None:
    """Its first blocks were copied with an earlier step."""
    index = make_index(2)
    for block, hash_ in enumerate((A, B)):
        index.store(block, hash_)
    index.pin([A, B])
    index.load(A, 6, overlapped=True)
    plan(index, 0)
    assert index.match(make_sequence([1]), [A, B]) is None
    index.load(B, 7, overlapped=True)
    plan(index, 1)
    assert index.match(make_sequence([1]), [A, B]) == [A, B]


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


# ---- The host tier: evicted blocks are copied to the host, and back on a hit -----------------


def offload_of(sim: Simulation) -> OffloadIndex:
    offload = sim.pool.offload
    assert offload
    return offload


def fill(sim: Simulation) -> None:
    """Run other prompts until nothing of earlier ones is left in the blocks."""
    for first in (2, 3):
        sim.add([first, *long_prompt(sim.limit - 3)], max_tokens=1)
        sim.run()


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    sim = Simulation(num_blocks=8, num_host_slots=32)
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    fill(sim)
    again = sim.add(long_prompt(17), max_tokens=2)
    plan = sim.send()
    assert plan and plan.added[0].num_computed_tokens == again.num_cached_tokens == 16
    copies = sim.scheduler.copies
    assert copies and [slot < 0 for _, slot in pairs(copies.blocking)].count(True) == 4
    sim.run()
    assert offload_of(sim).num_loaded == 4


def test_copies_overlap_the_step_of_others() -> None:
    """A sequence computes when its blocks are there; meanwhile it delays nobody."""
    sim = Simulation(num_blocks=24, max_model_len=60, num_host_slots=64, max_num_batched_tokens=8)
    sim.add(long_prompt(33), max_tokens=1)
    sim.run()
    fill(sim)
    sim.add([1], max_tokens=20, ignore_eos=True)
    sim.step()
    again = sim.add(long_prompt(33), max_tokens=1)
    num_overlapped = []
    while not again.output_token_ids:
        plan = sim.send()
        if plan and sim.scheduler.copies:
            copies = pairs(sim.scheduler.copies.overlapped)
            num_overlapped.append(sum(slot < 0 for _, slot in copies))
            assert all(slot >= 0 for _, slot in pairs(sim.scheduler.copies.blocking))
        if sim.has_result:
            sim.receive()
    assert sum(num_overlapped) == 8
    assert max(num_overlapped) == 2 == 8 // sim.config.block_size
    sim.run()


def test_a_preempted_sequence_gets_its_blocks_back() -> None:
    sim = Simulation(num_blocks=8, num_host_slots=32)
    old = sim.add(long_prompt(13), max_tokens=12, ignore_eos=True)
    new = sim.add([2, *long_prompt(12)], max_tokens=12, ignore_eos=True)
    sim.run()
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert sim.scheduler.num_recomputed_tokens <= sim.config.block_size
    assert offload_of(sim).num_loaded > 0


@pytest.mark.parametrize("of_scheduler", [False, True])
def test_the_host_tier_outlives_workers_and_scheduler(of_scheduler: bool) -> None:
    sim = Simulation(num_blocks=8, num_host_slots=32)
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    fill(sim)
    sim.step()
    if of_scheduler:
        sim.restart_scheduler()
    else:
        sim.restart(keeps_memory=True)
    again = sim.add(long_prompt(17), max_tokens=2)
    sim.run()
    assert again.num_cached_tokens == 16


def test_copies_in_flight_are_void_after_a_death() -> None:
    sim = Simulation(num_blocks=8, num_host_slots=32)
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    sim.add([2, *long_prompt(28)], max_tokens=1)
    sim.send()
    copies = sim.scheduler.copies
    assert copies and copies.blocking and offload_of(sim).num_blocks > 0
    sim.restart(keeps_memory=True)
    assert offload_of(sim).num_blocks == 0
    sim.run()


class OffloadMachine(SchedulerMachine):
    """All faults, with a host tier and few blocks."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.num_plans = data.draw(st.sampled_from([1, 2, 4]))
        self.sim = data.draw(simulations(self.num_plans, st.sampled_from([1, 2, 5, 12, 60])))


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_the_host_tier_against_the_reference() -> None:
    run_state_machine_as_test(OffloadMachine, settings=settings.get_profile("scheduler"))


def test_a_prefix_comes_from_files_after_everything_was_lost() -> None:
    """Workers have new memory, and the scheduler is another one."""
    sim = Simulation(num_blocks=8, num_host_slots=12, kv_offload_folder="folder")
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    fill(sim)
    files = sim.worker.host.files
    sim.restart(keeps_memory=False)
    sim.worker.host.files = files
    assert offload_of(sim).num_blocks == 0
    sim.send()
    again = sim.add(long_prompt(17), max_tokens=2)
    assert sim.send() is None, "it waits for the list of the files"
    sim.answer()
    assert sim.send() is None, "it waits for its files"
    assert sim.answer()
    sim.run()
    assert (again.num_cached_tokens, offload_of(sim).num_fetched) == (16, 4)


@pytest.mark.parametrize(
    ("length", "num_states", "waits"),
    [
        (4, 0, False),
        (17, 0, False),
        (18, 0, False),
        (29, 0, True),
        (4, 8, False),
        (17, 8, False),
        (29, 8, True),
    ],
)
def test_a_prompt_waits_for_the_list_if_files_may_have_more_of_its_prefix(
    length: int, num_states: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have kept 16 tokens; a model with recurrent state also needs a checkpoint."""
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", 4)
    options = {"num_state_blocks": num_states, "num_pieces": 3} if num_states else {}
    sim = Simulation(num_blocks=40, num_host_slots=12, kv_offload_folder="folder", **options)
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    sim.restart(keeps_memory=True)
    sequence = sim.add(long_prompt(length), max_tokens=2)
    sim.send()
    assert offload_of(sim).awaits_list
    assert (sequence.status is Status.WAITING) == waits
    sim.run()
    assert sequence.num_cached_tokens == min(length - 1, 16) // 4 * 4


def test_a_prompt_whose_prefix_is_on_the_host_does_not_wait_for_the_list() -> None:
    sim = Simulation(num_blocks=8, num_host_slots=32, kv_offload_folder="folder")
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    fill(sim)
    sim.restart(keeps_memory=True)
    sequence = sim.add(long_prompt(17), max_tokens=2)
    sim.send()
    assert offload_of(sim).awaits_list
    assert sequence.status is not Status.WAITING
    sim.run()
    assert sequence.num_cached_tokens == 16


def test_a_prompt_without_its_checkpoint_waits_for_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks are in memory; checkpoints of other prompts have evicted the checkpoint."""
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", 4)
    options = {"num_state_blocks": 3, "num_pieces": 3, "kv_offload_folder": "folder"}
    sim = Simulation(num_blocks=40, num_host_slots=1, **options)
    for first in (1, 2, 3):
        sim.add([first, *long_prompt(16)], max_tokens=1)
        sim.run()
    sim.restart(keeps_memory=True)
    sequence = sim.add([1, *long_prompt(16)], max_tokens=2)
    sim.send()
    assert offload_of(sim).awaits_list
    assert sequence.status is Status.WAITING
    sim.run()
    assert sequence.num_cached_tokens == 0


def test_all_ranks_list_their_files_for_each_worker_group() -> None:
    index = make_index(2)
    assert not index.awaits_list
    for epoch in (1, 2):
        index.use_folder(FolderIndex(epoch, num_ranks=2))
        for report in (
            FolderReport(epoch, 0, added=[A]),
            FolderReport(epoch, 0, is_listed=True),
            FolderReport(epoch, 0, added=[B]),
            FolderReport(epoch, 1, added=[B]),
            FolderReport(epoch - 1, 1, is_listed=True),
        ):
            index.on_report(report)
            assert index.awaits_list
        index.on_report(FolderReport(epoch, 1, added=[A], is_listed=True))
        assert not index.awaits_list


def test_damaged_files_are_computed_again() -> None:
    sim = Simulation(num_blocks=8, num_host_slots=4, kv_offload_folder="folder")
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    fill(sim)
    sim.answer()
    again = sim.add(long_prompt(17), max_tokens=2)
    sim.send()
    assert sim.answer(fails=True)
    sim.run()
    assert again.num_cached_tokens == 4


@pytest.mark.parametrize("folder", ["", "folder"])
def test_a_salt_that_spells_a_block_does_not_make_its_hash(folder: str) -> None:
    """The KV of a client's second block must not be that of another client's first block."""
    sim = Simulation(num_blocks=8, num_host_slots=32, kv_offload_folder=folder)
    prompt = long_prompt(9)
    sim.add(prompt[4:], cache_salt=pack(prompt[:4]).decode(), max_tokens=1)
    sim.run()
    fill(sim)
    sim.add(prompt, max_tokens=1)
    sim.run()
    fill(sim)
    victim = sim.add(prompt, max_tokens=2)
    sim.run()  # the reference worker checks every key that is read
    assert victim.num_cached_tokens == 8


# ---- Content that was never evicted is written to files while nothing runs -------------------


def saved(sim: Simulation) -> dict[bytes, object]:
    """Return the files when nothing is left to do."""
    sim.run()
    while sim.step() or sim.scheduler.in_flight:
        pass
    assert sim.scheduler.block_manager.num_unsaved_blocks == 0
    return dict(sim.worker.host.files)


def test_blocks_that_were_never_evicted_are_written() -> None:
    sim = Simulation(num_blocks=40, num_host_slots=4, kv_offload_folder="folder")
    first = sim.add(long_prompt(29), max_tokens=1)
    assert set(saved(sim)) == set(first.block_hashes[:7])


def test_nothing_is_saved_while_a_request_runs() -> None:
    """Its steps do not wait for copies that can wait."""
    sim = Simulation(num_blocks=40, num_host_slots=40, kv_offload_folder="folder")
    sim.add(long_prompt(17), max_tokens=1)
    sim.add([1], max_tokens=20, ignore_eos=True)
    while sim.scheduler.running:
        sim.send()
        assert sim.scheduler.copies is None
        if sim.has_result:
            sim.receive()
    assert len(saved(sim)) == 9


def test_saved_content_is_evicted_from_the_host_first() -> None:
    """It is in a block and in a file; other content is in a file only."""
    index = make_index(2)
    index.use_folder(FolderIndex(1, num_ranks=1))
    index.store(1, A)
    plan(index, 0)
    index.on_report(FolderReport(1, 0, added=[A]))
    index.save(2, B)
    plan(index, 1)
    index.on_report(FolderReport(1, 0, added=[B]))
    index.store(3, C)
    assert (index.find([A]), index.find([B]), index.find([C])) == ([A], [], [C])


def test_the_disk_sets_the_pace() -> None:
    """A slot is not used again before it is written."""
    index = make_index(8)
    index.use_folder(FolderIndex(1, num_ranks=2))
    assert index.may_save
    for number in range(2):
        index.save(number, bytes([number]) * HASH_BYTES)
    plan(index, 0)
    assert not index.may_save
    index.on_report(FolderReport(1, 0, added=[A, B]))
    assert not index.may_save
    index.on_report(FolderReport(1, 1, added=[A], unwritten=[B]))
    assert index.may_save
    assert index.num_unsaved == 0


def test_a_slot_is_written_with_the_content_that_it_has_then() -> None:
    """A copy of the same plan may take the slot."""
    index = make_index(1)
    index.store(7, A)
    plan(index, 0)
    index.confirm(0)
    index.use_folder(FolderIndex(1, num_ranks=1))
    assert index.num_unsaved == 1
    index.save_slots()
    index.store(8, B)
    plan(index, 1)
    request = index.take_request(1)
    assert request
    assert request.stored == []


@pytest.mark.parametrize("of_scheduler", [False, True])
def test_what_was_not_written_before_a_death_is_written_after_it(of_scheduler: bool) -> None:
    sim = Simulation(num_blocks=8, num_host_slots=32, kv_offload_folder="folder")
    sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    fill(sim)
    before = saved(sim)
    sim.worker.host.files.clear()  # as if no thread had written one
    if of_scheduler:
        sim.restart_scheduler()
    else:
        sim.restart(keeps_memory=True)
    assert saved(sim) == before
