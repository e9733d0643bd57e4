"""Checkpoints of the recurrent state in the tiers: with several slots each, and their blocks."""

import pytest

from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.worker import FolderReport
from penstock.services.scheduler.blocks import state_blocks
from tests.services.scheduler.blocks.test_offload import fill, offload_of, saved
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.packed_plans import pairs
from tests.services.scheduler.reference import LOOP
from tests.services.scheduler.simulation import Simulation


@pytest.fixture
def chunks_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", 4)


def with_states(num_host_slots: int = 40, **options: object) -> Simulation:
    """Return a simulation of one sequence at a time, with room for no checkpoint beside it."""
    sizes = {"num_blocks": 8, "num_state_blocks": 2, "num_pieces": 3} | options
    return Simulation(num_host_slots=num_host_slots, **sizes)  # type: ignore[arg-type]


def cached(sim: Simulation, prompt: list[int], **sampling: object) -> int:
    """Return the tokens of a prompt that were found. The reference worker checks their state."""
    sequence = sim.add(prompt, **{"max_tokens": 2} | sampling)
    sim.run()
    return sequence.num_cached_tokens


@pytest.mark.usefixtures("chunks_of_4")
def test_an_evicted_checkpoint_comes_back_from_the_host() -> None:
    sim = with_states()
    assert cached(sim, long_prompt(17)) == 0
    fill(sim)
    assert cached(sim, long_prompt(17)) == 16
    assert offload_of(sim).num_loaded == 4, "of KV blocks"


@pytest.mark.usefixtures("chunks_of_4")
def test_a_checkpoint_on_the_host_continues_blocks_of_the_workers() -> None:
    sim = with_states(num_blocks=40)
    cached(sim, long_prompt(17))
    fill(sim)
    assert cached(sim, long_prompt(17)) == 16
    assert offload_of(sim).num_loaded == 0


@pytest.mark.usefixtures("chunks_of_4")
def test_a_loaded_checkpoint_is_loaded_once() -> None:
    """Requests that come meanwhile wait for it, and begin at its state block."""
    sim = with_states(num_host_slots=100, num_state_blocks=8)
    cached(sim, long_prompt(17))
    for first in range(50, 60):
        cached(sim, [first, *long_prompt(16)])
    sequences = [sim.add([*long_prompt(16), last], max_tokens=2) for last in (50, 51, 52)]
    copies = []
    while any(sequence.finish_reason is None for sequence in sequences):
        if sim.send() and sim.scheduler.copies:
            both = sim.scheduler.copies.blocking + sim.scheduler.copies.overlapped
            copies += [block for block, slot in pairs(both) if slot < 0]
        if sim.has_result:
            sim.receive()
    assert sorted(block for block in copies if block < 0) == sorted(set(copies))[:3]
    assert [sequence.num_cached_tokens for sequence in sequences] == [16, 16, 16]


@pytest.mark.usefixtures("chunks_of_4")
@pytest.mark.parametrize("index", range(3))
def test_a_checkpoint_needs_all_its_pieces(index: int) -> None:
    sim = with_states()
    first = sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    cached(sim, long_prompt(9))
    fill(sim)
    pieces = list(offload_of(sim).pieces(0, first.block_hashes[3]))
    offload_of(sim).discard([pieces[index][1]])
    assert cached(sim, long_prompt(17)) == 8


@pytest.mark.usefixtures("chunks_of_4")
def test_a_checkpoint_needs_its_blocks() -> None:
    sim = with_states()
    first = sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    cached(sim, long_prompt(9))
    fill(sim)
    offload_of(sim).discard([first.block_hashes[2]])
    assert cached(sim, long_prompt(17)) == 8


@pytest.mark.usefixtures("chunks_of_4")
@pytest.mark.parametrize("of_scheduler", [False, True])
def test_checkpoints_on_the_host_outlive_workers_and_scheduler(of_scheduler: bool) -> None:
    sim = with_states()
    cached(sim, long_prompt(17))
    fill(sim)
    sim.step()
    if of_scheduler:
        sim.restart_scheduler()
    else:
        sim.restart(keeps_memory=True)
    assert cached(sim, long_prompt(17)) == 16


@pytest.mark.usefixtures("chunks_of_4")
@pytest.mark.parametrize("loses_scheduler", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_deaths_while_a_checkpoint_is_copied(num_steps: int, loses_scheduler: bool) -> None:
    """A torn state is never read: the reference worker checks each."""
    sim = with_states(max_num_batched_tokens=12, num_state_blocks=4, num_blocks=12)
    cached(sim, long_prompt(17))
    fill(sim)
    sim.add([9, *long_prompt(6)], max_tokens=12, ignore_eos=True)
    sim.step()
    sequence = sim.add(long_prompt(17), max_tokens=9, ignore_eos=True)
    for _ in range(num_steps):
        sim.send()
    if loses_scheduler:
        sim.restart_scheduler(loses_worker=True)
    else:
        sim.restart(keeps_memory=True)
    sim.run()
    assert sequence.num_cached_tokens in (0, 16)
    fill(sim)
    assert cached(sim, long_prompt(17)) == 16


@pytest.mark.usefixtures("chunks_of_4")
def test_a_checkpoint_comes_from_files_after_everything_was_lost() -> None:
    sim = with_states(num_host_slots=12, kv_offload_folder="folder")
    cached(sim, long_prompt(17))
    fill(sim)
    files = sim.worker.host.files
    sim.restart(keeps_memory=False)
    sim.worker.host.files = files
    sim.send()
    sim.answer()
    assert cached(sim, long_prompt(17)) == 16
    assert offload_of(sim).num_fetched == 7


@pytest.mark.usefixtures("chunks_of_4")
def test_a_damaged_file_of_a_checkpoint_is_computed_again() -> None:
    sim = with_states(kv_offload_folder="folder")
    first = sim.add(long_prompt(17), max_tokens=1)
    sim.run()
    cached(sim, long_prompt(9))
    fill(sim)
    files = sim.worker.host.files
    sim.restart(keeps_memory=False)
    sim.worker.host.files = files
    sim.send()
    sim.answer()
    pieces = offload_of(sim).pieces(0, first.block_hashes[3])
    del files[list(pieces)[1][1]]
    assert cached(sim, long_prompt(17)) == 0, "files are requested once"
    assert cached(sim, [*long_prompt(16), 50]) == 16


@pytest.mark.usefixtures("chunks_of_4")
def test_a_checkpoint_that_was_never_evicted_is_written() -> None:
    sim = with_states(num_host_slots=9, num_blocks=40, num_state_blocks=8, kv_offload_folder="f")
    cached(sim, long_prompt(17))
    files = saved(sim)
    assert len(files) == 4 + 3
    sim.restart(keeps_memory=False)
    sim.worker.host.files = files  # type: ignore[assignment]
    sim.send()
    sim.answer()
    assert cached(sim, long_prompt(17)) == 16


@pytest.mark.usefixtures("chunks_of_4")
def test_files_that_are_read_one_by_one_are_awaited() -> None:
    sim = with_states(kv_offload_folder="folder")
    cached(sim, long_prompt(17))
    files = saved(sim)
    sim.restart(keeps_memory=False)
    host = sim.worker.host
    host.files = files  # type: ignore[assignment]
    sim.send()
    sim.answer()
    sequence = sim.add(long_prompt(17), max_tokens=2)
    sim.send()
    request = host.requests.popleft()
    for hash_, slot in zip(request.fetched, unpack(request.slots), strict=True):
        assert sim.send() is None
        host.slots[slot] = host.files[hash_]
        report = FolderReport(sim.scheduler.epoch, 0, fetched=[hash_])
        sim.scheduler.block_manager.on_report(report)
    sim.run()
    assert sequence.num_cached_tokens == 16


@pytest.mark.usefixtures("chunks_of_4")
def test_a_checkpoint_of_a_sequence_that_failed_is_forgotten() -> None:
    """Its state may be NaN, as its logits are."""
    sim = with_states(num_blocks=40)
    prompt = long_prompt(9)
    first = sim.add(prompt, max_tokens=1)
    sim.run()
    fill(sim)
    checkpoint = first.block_hashes[1]
    assert offload_of(sim).has_checkpoint(checkpoint, in_files=False)
    grammar = StructuredOutputs(regex="a")
    sim.add(prompt, max_tokens=20, seed=LOOP, structured_outputs=grammar)
    while not sim.failed:
        sim.step()
    assert not offload_of(sim).has_checkpoint(checkpoint, in_files=False)
    sim.run()
