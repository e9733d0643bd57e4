"""Invariants between any two moves, recomputed from the sequences."""

from collections import Counter, defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.protocol.config import Config
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.state_blocks import StateBlocks
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import Sequence, Status
from tests.services.scheduler.reference import DEAD_END, expected_output, logprobs_at, pooled_of

if TYPE_CHECKING:
    from tests.services.scheduler.simulation import Simulation


def check_places(kv: BlockPool, states: StateBlocks, blocks_per_state: int) -> set[int]:
    """Check that each place is of one kind. Return the KV blocks in whose places are states."""
    if not blocks_per_state:
        return set()
    pool = states.pool
    places = {*pool.free_blocks(), *(n for n, count in enumerate(pool._ref_counts) if count)}
    assert pool.num_blocks == len(places) >= pool.num_reserved
    size = blocks_per_state
    lent = {block for n in places for block in range(n * size, (n + 1) * size)}
    assert kv.num_blocks == kv.capacity - len(lent)
    check_unused(kv, states, places, size)
    for pool in (kv, states.pool):
        used = [pool.used[block] for block in pool._evictable]
        assert used == sorted(used), "the free list is not in the order of releases"
    return lent


def check_unused(kv: BlockPool, states: StateBlocks, of_states: set[int], size: int) -> None:
    """Check the order of the places that nobody holds. of_states: places with a state block."""
    assert states._places
    held = Counter(block // size for block, count in enumerate(kv._ref_counts) if count)
    assert list(states._places._num_held) == [held[n] for n in range(states.pool.capacity)]
    unused = states._places._unused
    assert unused.keys() == {n for n in range(states.pool.capacity) if not held[n]} - of_states
    assert list(unused.values()) == sorted(unused.values())
    empty = {n for n, used in unused.items() if not used}
    assert empty.isdisjoint(block // size for block in kv._contents)


def check_blocks(
    pool: BlockPool, sequences: list[Sequence], block_size: int, lent: set[int]
) -> None:
    """Check references, the free list and the cache against the block tables."""
    holders: defaultdict[int, list[tuple[Sequence, int]]] = defaultdict(list)
    for sequence in sequences:
        if sequence.block_table:
            assert sequence.num_planned_tokens <= len(sequence.block_table) * block_size
        for index, block in enumerate(sequence.block_table):
            holders[block].append((sequence, index))
    assert list(pool._ref_counts) == [len(holders[block]) for block in range(pool.capacity)]
    assert not lent.intersection(block for block, found in holders.items() if found)
    assert set(pool.free_blocks()) == {b for b in range(pool.capacity) if not holders[b]} - lent
    assert not pool._contents.keys() & pool._empty
    assert pool.recovered or pool._contents.keys() >= pool._evictable.keys()
    for shared in holders.values():
        if len(shared) > 1:
            check_shared(shared, block_size)
    check_cache(pool)


def check_states(states: StateBlocks, sequences: list[Sequence]) -> None:
    """Check references of state blocks, and that every sequence has at most two."""
    held = Counter(block for s in sequences for block in s.state_blocks if block >= 0)
    assert list(states.pool._ref_counts) == [held[block] for block in range(states.pool.capacity)]
    check_cache(states.pool)


def check_shared(holders: list[tuple[Sequence, int]], block_size: int) -> None:
    """Check that the holders of a block share the prefix up to its end, and write after it."""
    assert len({index for _, index in holders}) == 1
    end = (holders[0][1] + 1) * block_size
    assert len({tuple(sequence.token_ids[:end]) for sequence, _ in holders}) == 1
    for sequence, _ in holders:
        assert end <= min(sequence.num_planned_tokens, len(sequence.token_ids))


def check_cache(pool: BlockPool) -> None:
    """Every content is found under its hash, and nothing else is."""
    contents = pool._contents
    assert {content.hash: block for block, content in contents.items()} == pool._cached
    assert len(pool._cached) == len(contents)
    assert len({content.number for content in contents.values()}) == len(contents)


def check_offload(pool: BlockPool, sequences: list[Sequence]) -> None:
    """Every slot is free or has one content, and pins are those of sequences that load."""
    if offload := pool.offload:
        slots = [entry.slot for entry in offload._entries.values()]
        slots += offload.folder.slots if offload.folder else []
        assert sorted(slots + offload._free) == list(range(offload.num_slots))
        pins = Counter(hash_ for sequence in sequences for hash_, _ in sequence.loads)
        assert offload._pins == pins + Counter(offload._loaded)
        assert set(pins) <= set(offload._entries)


def check_slots(scheduler: Scheduler, config: Config) -> None:
    """Every slot is free or has one row; every sequence is where its status says."""
    slots = [sequence.slot for sequence in scheduler.running]
    num_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
    assert sorted(slots + scheduler._free_slots) == list(range(num_slots))
    assert {s.status for s in scheduler.running} <= {Status.RUNNING}
    assert scheduler.running == sorted(scheduler.running, key=attrgetter("rank"))
    assert {s.status for s in scheduler.waiting} <= {Status.WAITING}
    for sequence in scheduler.waiting:
        assert (sequence.slot, sequence.block_table) == (-1, [])


def check_logprobs(sequence: Sequence, num_old: int) -> None:
    """One for each token of this attempt; those of the prompt with the first token."""
    token_ids = sequence.token_ids
    begin = sequence.num_prompt_tokens + num_old
    told = [logprobs_at(token_ids, position) for position in range(begin, len(token_ids))]
    asked = sequence.sampling.logprobs is not None
    assert sequence.logprobs == ([None] * num_old + told if asked else None)
    known = sequence.prompt_logprobs
    assert (known is None) == (sequence.sampling.prompt_logprobs is None)
    if known is not None:
        positions = range(1, 1 + len(known))
        assert known == [logprobs_at(token_ids, position) for position in positions]
        assert not (told and sequence.needs_prompt_logprobs)


def check_output(sim: "Simulation", sequence: Sequence) -> None:
    """Its tokens are the model's, and no more rows ran for it than could not be helped."""
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    tokens, reason = expected_output(
        prompt, sequence.sampling, sim.limit, sequence.is_chat, sequence.reasoning
    )
    if sequence.pooling is not None:
        tokens, reason = [], "stop"
        assert sequence in sim.cut or sequence.pooled == pooled_of(prompt)
    received, num_wasted = sim.received[sequence], sim.num_wasted[sequence]
    num_plans = sim.config.num_plans_in_flight
    cut = sim.cut | sim.failed
    assert sim.num_ends[sequence] == (sequence not in cut)
    if sequence.sampling.structured_outputs and DEAD_END in tokens[sim.num_old[sequence] :]:
        assert sequence in cut
    if sequence in sim.failed:
        assert tokens[len(received)] == DEAD_END
    if sequence in cut:
        assert received == tokens[: len(received)]
        assert num_wasted <= num_plans or sim.config.speculative_method != "none"
    else:
        assert (received, sequence.finish_reason) == (tokens, reason)
        if sim.config.speculative_method == "none":
            assert num_wasted <= (num_plans - 1 if reason == "stop" else 0)
