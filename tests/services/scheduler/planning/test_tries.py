"""The cost of waiting sequences: tries that can't succeed, and hashes. A block has 4 tokens."""

from collections.abc import Iterable, Iterator

import pytest

from penstock.services.scheduler import scheduler
from penstock.services.scheduler.blocks import block_manager
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.block_records import hash_block
from penstock.services.scheduler.sequence import Sequence
from tests.services.scheduler.builders import long_prompt, make_sequence
from tests.services.scheduler.simulation import Simulation


class Counts:
    """Counts searches in the pool, and hashes of full blocks."""

    def __init__(self) -> None:
        self.matches = self.hashes = 0

    def hash_block(self, parent: bytes, token_ids: bytes) -> bytes:
        self.hashes += bool(token_ids)
        return hash_block(parent, token_ids)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    own, match = Counts(), BlockPool.match

    def counted(pool: BlockPool, hashes: Iterable[bytes]) -> list[int]:
        own.matches += 1
        return match(pool, hashes)

    monkeypatch.setattr(BlockPool, "match", counted)
    monkeypatch.setattr(block_manager, "hash_block", own.hash_block)
    return own


def endless(sim: Simulation, prompt: list[int], **options: object) -> Sequence:
    return sim.add(prompt, ignore_eos=True, max_tokens=200, **options)


def test_a_sequence_that_lacks_blocks_is_not_searched_for_again(counts: Counts) -> None:
    sim = Simulation(num_blocks=20, max_model_len=80)
    first = endless(sim, long_prompt(16))
    sim.step()
    held = [endless(sim, long_prompt(64, 100 + 100 * i), client=f"{i}") for i in range(4)]
    sim.step()
    num_matches, num_hashes = counts.matches, counts.hashes
    while len(first.block_table) < 12:
        sim.step()
    assert counts.matches == num_matches
    assert counts.hashes - num_hashes <= 8  # the blocks that the first sequence has filled
    sim.finish(first, "abort")
    sim.step()
    assert held[0] in sim.scheduler.running
    sim.run()


def test_a_sequence_that_lacks_blocks_is_tried_when_enough_of_its_prefix_is_computed(
    counts: Counts,
) -> None:
    """Seven blocks are needed and five are free, so two must be shared."""
    blocks = BlockManager(BlockPool(12), 4)
    earlier = make_sequence(long_prompt(40, 500))
    assert blocks.allocate(earlier, keep_watermark=True)
    blocks.free(earlier)  # what was free before is no reason to try
    first = make_sequence(long_prompt(28))
    second = make_sequence([*long_prompt(24), *long_prompt(4, 100)])
    assert blocks.allocate(first, keep_watermark=True)
    assert not blocks.allocate(second, keep_watermark=True)
    assert counts.matches == 3
    for num_computed, fits in ((4, False), (4, False), (8, True)):
        blocks.publish(first, num_computed)
        assert blocks.allocate(second, keep_watermark=True) == fits
        assert counts.matches == 3 + fits
    assert second.num_planned_tokens == 8


def test_a_freed_block_is_not_enough(counts: Counts) -> None:
    """A new try is made when as many blocks came as were missing."""
    sim = Simulation(num_blocks=20, max_model_len=80, max_num_seqs=16)
    for first in range(6):
        endless(sim, long_prompt(8, 1 + first))
    sim.step()
    held = endless(sim, long_prompt(64, 100))
    sim.step()
    num_matches = counts.matches
    for sequence in sim.sequences[:3]:
        sim.finish(sequence, "abort")
        sim.step()
    assert counts.matches == num_matches
    for sequence in sim.sequences[3:6]:
        sim.finish(sequence, "abort")
        sim.step()
    assert counts.matches == num_matches + 1
    assert held in sim.scheduler.running
    sim.run()


def test_a_new_prompt_is_hashed_as_it_is_computed(counts: Counts) -> None:
    sim = Simulation(max_num_batched_tokens=8)
    endless(sim, long_prompt(30))
    numbers = []
    for _ in range(3):
        sim.send()
        numbers.append(counts.hashes)
        sim.receive()
    assert numbers == [2, 4, 6]


def test_cached_prompts_are_hashed_in_pieces_while_others_run(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "BLOCKS_PER_PLAN", 4)
    sim = Simulation(num_blocks=100, max_model_len=100, max_num_seqs=16)
    sim.add(long_prompt(60), max_tokens=1)
    sim.run()
    running = endless(sim, [5])
    sim.step()
    cached = [endless(sim, [*long_prompt(56), 100 + i], client=f"{i}") for i in range(3)]
    short = endless(sim, [7], client="short")
    numbers = []
    while cached[-1] not in sim.scheduler.running:
        before = counts.hashes
        assert short not in sim.scheduler.running, "it has passed"
        assert sim.send()
        numbers.append(counts.hashes - before)
        sim.receive()
    assert max(numbers) <= 4 + 1  # and a block of the running sequence
    assert len(numbers) >= 3 * 14 // 4
    assert [sequence.num_cached_tokens for sequence in cached] == [56, 56, 56]
    sim.finish(running, "abort")
    sim.finish(short, "abort")
    sim.run()


def test_a_plan_admits_few_long_prompts_that_are_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each hashes and shares 14 blocks, so the first leaves 12 of 40, and the second 24."""
    monkeypatch.setattr(scheduler, "BLOCKS_PER_PLAN", 40)
    sim = Simulation(num_blocks=100, max_model_len=100, max_num_seqs=16)
    sim.add(long_prompt(60), max_tokens=1)
    sim.run()
    running = endless(sim, [5])
    sim.step()
    num_before = len(sim.plans)
    cached = [endless(sim, [*long_prompt(56), 100 + i], client=f"{i}") for i in range(3)]
    while cached[-1] not in sim.scheduler.running:
        assert sim.send()
        sim.receive()
    assert [len(plan.added) for plan in sim.plans[num_before:]] == [1, 2]
    sim.finish(running, "abort")
    sim.run()


def test_a_prompt_is_hashed_at_once_if_nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "BLOCKS_PER_PLAN", 4)
    sim = Simulation(num_blocks=100, max_model_len=100)
    sim.add(long_prompt(60), max_tokens=1)
    sim.run()
    cached = [sim.add([*long_prompt(56), 100], max_tokens=4) for _ in range(3)]
    assert sim.send()
    assert sim.scheduler.running == cached[:1]
    assert cached[0].num_cached_tokens == 56
    sim.run()


def test_what_waits_for_a_long_prompt_s_blocks_is_not_hashed(counts: Counts) -> None:
    """Waiting prompts are compared with the long prompt by their tokens."""
    sizes = {"num_blocks": 1000, "max_model_len": 2000, "target_itl_ms": 20}
    sim = Simulation(machine=lambda shape: (1 + shape.num_tokens) / 1000, **sizes)  # type: ignore[arg-type]
    stream = endless(sim, [1])
    sim.step()
    first = sim.add(long_prompt(1900), max_tokens=1)
    while first.num_planned_tokens < 800:
        sim.step()
    waiting = [sim.add([*long_prompt(1850), 5 + n], max_tokens=1) for n in range(2)]
    before = counts.hashes
    sim.step()
    assert all(sequence in sim.scheduler.waiting for sequence in waiting)
    assert counts.hashes - before <= 20
    sim.finish(stream, "abort")
    sim.run()


def test_blocks_that_were_found_leave_no_negative_budget() -> None:
    """The next admitted prompt is found as a whole."""
    sim = Simulation(num_blocks=100, max_model_len=200)
    sim.add(long_prompt(101), max_tokens=1)
    sim.run()
    blocks = sim.scheduler.block_manager
    for _ in range(2):
        blocks.budget = 4
        assert blocks.allocate(found := make_sequence([*long_prompt(100), 7]), False)
        assert blocks.budget == 0
        assert found.num_planned_tokens == 100
