"""The KV cache of sequences, in blocks of the workers' memory and in its tiers.

`BlockManager` is the interface for planning and recovery. The manager allocates, publishes and
rolls back blocks, and plans copies to the host and back. After a worker failure, the manager gives
the position after which a sequence continues.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import takewhile
from secrets import token_bytes
from typing import NamedTuple

from penstock.protocol.config import Config
from penstock.protocol.messages.worker import CopyBlocks, FolderReport, FolderRequest
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.block_records import (
    HASH_BYTES,
    ROOT,
    BlockRecords,
    hash_block,
    hash_root,
)
from penstock.services.scheduler.blocks.offload_index import FolderIndex, OffloadIndex
from penstock.services.scheduler.blocks.state_blocks import StateBlocks
from penstock.services.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

# Blocks of waiting sequences that are hashed or shared for a plan while other sequences run; a hash
# takes 0.6 µs. Longer prompts are hashed over several plans.
BLOCKS_PER_PLAN = 2048


class _Prefix(NamedTuple):
    """The prefix of a sequence that is in the pool and its tiers."""

    hashes: list[bytes]  # of its full blocks
    matched: list[int]  # the first blocks, as far as they are cached
    loads: list[bytes]  # keys of the other blocks, and of the pieces of a checkpoint, on the host
    num_seen: int  # number of full blocks that were found, with a checkpoint or not


class BlockManager:
    """The allocator of blocks for sequences, with the prefix cache.

    `watermark` is the number of blocks that admission leaves free for running sequences.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        watermark: int = 0,
        caching: bool = True,
        states: BlockPool | None = None,
        blocks_per_state: int = 0,
    ) -> None:
        """Manage the blocks of `pool`. states: state blocks of a model with recurrent state."""
        self.pool = pool
        self.block_size, self.watermark = block_size, watermark
        self.budget = BLOCKS_PER_PLAN  # what is left of it for the current plan
        self._caching = caching
        self.records = pool.records if caching else None
        # index of the host tier; `pool.offload` is None while the workers have no host tier
        self.offload: OffloadIndex | None = None
        self.states = StateBlocks(states, block_size, pool, blocks_per_state) if states else None

    @property
    def num_blocks(self) -> int:
        return self.pool.capacity

    @property
    def num_state_blocks(self) -> int:
        return self.states.pool.capacity if self.states else 0

    @property
    def _pools(self) -> list[BlockPool]:
        return [self.pool, self.states.pool] if self.states else [self.pool]

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def max_tokens(self) -> int:
        """Maximum length of a sequence that has the whole memory."""
        in_states = 2 * self.states.blocks_per_state if self.states else 0
        return (self.pool.capacity - in_states) * self.block_size

    @property
    def _num_released(self) -> int:
        return self.pool.num_released + (self.states.num_released if self.states else 0)

    # ---- allocate ------------------------------------------------------------------------------

    def has_room(self, keep_watermark: bool) -> bool:
        """Return whether `allocate` may succeed. It needs at least one unshared block."""
        least, has_state = self.watermark * keep_watermark, not self.states or self.states.has_room
        return has_state and self.pool.num_free_blocks > least

    def allocate(self, sequence: Sequence, keep_watermark: bool) -> bool:
        """Allocate blocks for all tokens, and room for the state.

        Return False if blocks are missing or still loading, or if hashes are missing while other
        sequences run, which `keep_watermark` says. A try that lacks blocks is remembered, so the
        next tries cost nothing until enough blocks may have come.
        """
        least, is_alone = self.watermark * keep_watermark, not keep_watermark
        if not self._may_fit(sequence, least) or (
            self.states and not self.states.reserve(is_alone)
        ):
            return False
        is_allocated = self._allocate(sequence, least, is_alone)
        if self.states and not is_allocated:
            self.states.cancel()
        return is_allocated

    def _allocate(self, sequence: Sequence, least: int, is_alone: bool) -> bool:
        cached = self._find_cached(sequence, is_alone)
        found = None if cached is None else self._find_prefix(sequence, cached)
        if cached is None or found is None:
            return False
        matched, loads, num_tokens = found.matched, found.loads, len(sequence.token_ids)
        num_found = len(found.hashes)
        num_own = sequence.num_kept_blocks if num_found == len(sequence.block_hashes) else 0
        last, num_kept = (-1, 0) if loads else self._match_recovered(sequence, matched)
        shared = matched[: num_found - num_own]
        tail = [*matched[len(shared) :], *([last] if num_kept else [])]
        num_needed = max(-(-num_tokens // self.block_size), num_found)
        num_new = num_needed - len(shared) - len(tail)
        num_left = self.pool.num_free_without(shared + tail) - num_new
        if num_left < least:
            num_left = self.pool.num_free_without(cached) + len(cached) - num_needed
            sequence.tried = len(cached), num_left - self._num_released
            return False
        self.budget = max(0, self.budget - len(matched))
        sequence.awaited, sequence.has_fetched = b"", False
        if self.pool.offload:
            self.pool.offload.pin(loads)
        sequence.published_content = self.pool.share(shared)
        sequence.num_published_blocks = len(shared)
        for block in tail:
            self.pool.adopt(block)
        places: list[int] = []  # to which the checkpoint is copied
        if self.states:
            num_seen = min(found.num_seen, self._num_publishable(sequence, num_tokens))
            prefix = found.hashes, num_seen * self.block_size, num_own > 0
            places = self.states.allocate(sequence, *prefix, self._caching)
        sequence.block_table = shared + tail
        sequence.capacity = len(sequence.block_table) * self.block_size
        for _ in range(num_new):
            self.append(sequence)
        places = sequence.block_table[len(matched) : num_found] + places
        sequence.loads.extend(zip(loads, places, strict=True))
        sequence.num_prefill_tokens, sequence.num_computed_tokens = num_tokens, 0
        sequence.num_planned_tokens = num_found * self.block_size + num_kept
        if sequence.num_kept_blocks:
            if num_own:
                sequence.num_planned_tokens = min(sequence.num_kept_tokens, num_tokens - 1)
            self._drop_kept(sequence)
        self._record_tail(sequence, sequence.num_planned_tokens)
        sequence.record_place = 0
        return True

    def _may_fit(self, sequence: Sequence, least: int) -> bool:
        """Return whether a new try may succeed, and leave `least` blocks free.

        Each block that was released since the last try, or extends the cached prefix, may help.
        """
        tier = self.pool.offload
        if sequence.awaited and tier and tier.is_awaited(sequence.awaited):
            return False
        if sequence.tried is None:
            return True
        num_matched, num_left = sequence.tried
        following = self._lookups(sequence, num_matched, self._num_matchable(sequence))
        num_more = sum(1 for _ in takewhile(self.pool.has, following))
        sequence.tried = num_matched + num_more, num_left + num_more
        return num_left + num_more + self._num_released >= least

    def _find_cached(self, sequence: Sequence, is_alone: bool) -> list[int] | None:
        """Return the longest prefix in the pool; None if hashes are missing.

        The budget limits the hashes of a plan, except for a sequence that runs alone.
        """
        num_hashed, num_matchable = len(sequence.block_hashes), self._num_matchable(sequence)
        end = num_matchable if is_alone else min(num_matchable, num_hashed + self.budget)
        cached = self.pool.match(self._lookups(sequence, 0, end))
        if self.pool.offload:
            self._hash_blocks(sequence, end)
        self.budget -= len(sequence.block_hashes) - num_hashed
        return None if len(sequence.block_hashes) == end < num_matchable else cached

    def _num_matchable(self, sequence: Sequence) -> int:
        """Return the number of full blocks that a waiting sequence may share."""
        if sequence.needs_prompt_logprobs:
            return 0  # prompt logprobs are computed with the prompt
        if sequence.num_kept_blocks:
            return len(sequence.block_hashes)
        num_tokens = len(sequence.token_ids)  # one token is always computed
        return min((num_tokens - 1) // self.block_size, self._num_publishable(sequence, num_tokens))

    def shared_end(self, sequence: Sequence, other: Sequence) -> int:
        """Return the position up to which `other` will compute what a waiting sequence may share.

        0: nothing. A model with recurrent state will have a checkpoint there.
        """
        size, begin = self.block_size, other.num_planned_tokens
        most, after = self._num_matchable(sequence) * size, (begin // size + 1) * size
        ends = sorted(other.checkpoints) if self.states else range(after, most + 1, size)
        ends = [end for end in ends if begin < end <= min(most, other.num_prefill_tokens)]
        is_other = sequence.num_kept_blocks or sequence.cache_salt != other.cache_salt
        if not ends or is_other or not sequence.equals(other, begin, after):
            return 0
        shared = ends[: bisect_left(ends, True, key=lambda end: not sequence.equals(other, 0, end))]
        has = (self.states.pool if self.states else self.pool).has
        is_missing = any(not has(self._hash_before(other, end // size)) for end in shared)
        return shared[-1] if is_missing else 0

    def _lookups(self, sequence: Sequence, begin: int, end: int) -> Iterator[bytes]:
        """Yield the hashes of the full blocks [begin, end), each computed when it is needed."""
        yield from sequence.block_hashes[begin:end]
        for index in range(len(sequence.block_hashes), end):
            yield self._hash_before(sequence, index + 1)

    def _find_prefix(self, sequence: Sequence, cached: list[int]) -> _Prefix | None:
        """Find the longest prefix in the pool (`cached`) and its tiers.

        Return None if the sequence must wait. Of a model with recurrent state, the prefix has a
        checkpoint at its end.
        """
        tier, states = self.pool.offload, self.states
        hashes, num_seen = sequence.block_hashes[: self._num_matchable(sequence)], len(cached)
        if tier and tier.awaits_list:  # files may have what is not in memory
            num_missing = len(hashes) - num_seen - tier.num_found(hashes[num_seen:], False)
            if num_missing or (states and not states.has_last(hashes)):
                return None
        for in_files in (not sequence.has_fetched, False):  # not all files may be available
            number = len(hashes)
            pieces: list[bytes] = []
            if states:
                number = len(cached)
                if tier:
                    number += tier.num_found(hashes[number:], in_files)
                num_seen = max(num_seen, number)
                number = states.num_restorable(hashes[:number], in_files)
                pieces = states.missing(hashes[:number])
            matched = cached[:number]
            wanted = hashes[len(matched) : number] + pieces
            loads = tier.match(sequence, wanted) if tier and wanted else []
            if loads is None:
                return None
            if states is None:
                number = len(matched) + len(loads)
            if states is None or len(loads) == len(wanted):
                return _Prefix(hashes[:number], matched, loads, num_seen)
        return _Prefix([], [], [], num_seen)

    def _match_recovered(self, sequence: Sequence, matched: list[int]) -> tuple[int, int]:
        """Find a recovered block for the tokens after the matched blocks.

        Return the block and its number of equal tokens, as `RecoveredBlocks.find` does. A sequence
        that had output may take a full block, which other sequences then can't match.
        """
        recovered = self.pool.recovered
        if not recovered or not self._caching or sequence.needs_prompt_logprobs or self.states:
            return -1, 0
        begin = len(matched) * self.block_size
        end = min(begin + self.block_size, len(sequence.token_ids) - 1)
        before = self._hash_before(sequence, len(matched))
        tail, had_output = hash_block(before, b""), sequence.num_lost_tokens > 0
        keys = [tail, before] if had_output else [tail]
        return recovered.find(self.pool.last_number(matched), keys, sequence.token_ids[begin:end])

    def append(self, sequence: Sequence) -> int:
        """Append a block to the block table. Raises KeyError if no block is free."""
        block = self.pool.take(sequence.block_table)
        sequence.block_table.append(block)
        sequence.capacity += self.block_size
        return block

    # ---- free, and keep for a preempted sequence -----------------------------------------------

    def free(self, sequence: Sequence, keeps: bool = False) -> list[tuple[int, int]]:
        """Release all blocks, and what was kept for the sequence.

        Plans run in order on one stream. So the next plan may reuse blocks to which plans in flight
        still write. keeps: keep what the plans so far compute, see `_keep`; return its checkpoints,
        as `publish` does, of which the plans in flight must be confirmed.
        """
        if sequence.num_kept_blocks:
            self._drop_kept(sequence)
        checkpoints = self._keep(sequence) if keeps else []
        if self.states and sequence.block_table:
            self.states.free(sequence)
        self.pool.release(sequence.block_table)
        sequence.block_table, sequence.capacity = [], 0
        if self.pool.offload and sequence.loads:
            self.pool.offload.unpin(key for key, _ in sequence.loads)
        sequence.loads.clear()
        return checkpoints

    def _keep(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Let a sequence with recurrent state that is preempted continue where it is.

        Within a prompt, its state becomes a checkpoint. Later, KV and state are of this sequence
        alone: they are published with random hashes, so that the host tier takes them as others.
        """
        states, num_tokens = self.states, sequence.num_planned_tokens
        if not (states and self._caching and states.has_own(sequence)):
            return []
        first = sequence.num_published_blocks
        own = sequence.block_table[first : -(-num_tokens // self.block_size)]
        if not own and num_tokens % states.unit == 0:
            hash_ = self._hash_before(sequence, num_tokens // self.block_size)
            return [states.publish(sequence, hash_)]
        if own and self.pool.offload:
            hashes = [token_bytes(HASH_BYTES) for _ in own]
            self.pool.publish_own(own, sequence.published_content, hashes)
            states.pool.publish_own(sequence.state_blocks[:1], ROOT, hashes[-1:])
            sequence.block_hashes[first:] = hashes
            sequence.num_kept_tokens, sequence.num_kept_blocks = num_tokens, len(own)
        return []

    def _drop_kept(self, sequence: Sequence) -> None:
        """Forget what was kept for a sequence. Copies from the host that are planned still run."""
        first = len(sequence.block_hashes) - sequence.num_kept_blocks
        hashes = sequence.block_hashes[first:]
        self.pool.unpublish(hashes)
        if self.states:
            self.states.pool.unpublish(hashes[-1:])
        del sequence.block_hashes[first:]
        sequence.num_kept_tokens = sequence.num_kept_blocks = 0

    def is_chunk(self, sequence: Sequence, budget: int) -> bool:
        """Return whether a budget of tokens suffices for the first chunk of a waiting sequence."""
        least = min(self.states.unit, len(sequence.token_ids)) if self.states else 1
        return budget >= least

    def chunk_end(self, sequence: Sequence, most: int) -> int:
        """Return the end of the next chunk of prefill, at most `most`; the chunk may be empty."""
        end = min(most, sequence.num_prefill_tokens)
        return self.states.chunk_end(sequence, end) if self.states else end

    def advance_states(
        self, sequences: Iterable[Sequence], chunk_ends: dict[Sequence, int], number: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Plan the state blocks of the plan `number`, which computes these sequences.

        Return the plan's `states`, and its checkpoints as (block, number of its content).
        chunk_ends: end of the chunk of each sequence in prefill.
        """
        if self.states is None:
            return [], []
        named = self.states.advance(sequences, number)
        checkpoints = [
            self.states.publish(sequence, self._hash_before(sequence, end // self.block_size))
            for sequence, end in chunk_ends.items()
            if end in sequence.checkpoints
        ]
        return named, checkpoints

    # ---- publish -------------------------------------------------------------------------------

    def confirm(self, sequence: Sequence) -> None:
        """Publish or record the newest computed token, after workers have sampled the next token.

        Called once per token.
        """
        num_computed = len(sequence.token_ids)
        if self._num_publishable(sequence, num_computed) > sequence.num_published_blocks:
            self.pool.confirm(self.publish(sequence, num_computed))
        elif self.records and not self.states:
            if place := sequence.record_place:
                self.records.tokens[place] = sequence.token_ids[-1] + 1
                sequence.record_place = place + 1
            else:
                self._record_tail(sequence, num_computed)

    def _record_tail(self, sequence: Sequence, num_computed: int) -> None:
        """Record the confirmed tokens of a partly filled last block, if any.

        Then `record_place` is the place of the next token in the records.
        """
        index, num_tokens = divmod(num_computed, self.block_size)
        table = sequence.block_table
        is_next = index == sequence.num_published_blocks and index < len(table)
        if self.records and num_tokens and is_next and not self.states:
            before = hash_block(self._hash_before(sequence, index), b"")
            token_ids = sequence.token_ids[num_computed - num_tokens : num_computed]
            self.records.write_tail(table[index], sequence.published_content, before, token_ids)
            sequence.record_place = self.records.token_place(table[index], num_tokens)

    def _hash_before(self, sequence: Sequence, number: int) -> bytes:
        """Return the chained hash of the first blocks."""
        self._hash_blocks(sequence, number)
        return sequence.block_hashes[number - 1] if number else hash_root(sequence.cache_salt)

    def _num_publishable(self, sequence: Sequence, num_computed: int) -> int:
        """Return the number of full blocks that other sequences may have; 0 without caching.

        A model with recurrent state computes sampled tokens in another order of arithmetic than the
        tokens of a prompt. So their KV has other bits, and stays with its sequence.
        """
        if self.states:
            num_computed = min(num_computed, sequence.num_prompt_tokens)
        return num_computed // self.block_size if self._caching else 0

    def publish_loaded(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Publish the checkpoint that a sequence has loaded, if any, before its first chunk.

        Return (block, number of its content), as `publish` does.
        """
        if self.states is None or not self._caching:
            return []
        hash_ = self._hash_before(sequence, sequence.num_planned_tokens // self.block_size)
        return self.states.publish_loaded(sequence, hash_)

    def publish(self, sequence: Sequence, num_computed: int) -> list[tuple[int, int]]:
        """Publish all full blocks whose tokens are known and computed by the plans so far.

        Return (block, number of its content) of each published block, for `BlockPool.confirm`.

        The plan that is being built counts, because plans run in order. A sequence that was
        preempted meanwhile has no blocks, so nothing is published.
        """
        num_full = min(self._num_publishable(sequence, num_computed), len(sequence.block_table))
        self._hash_blocks(sequence, num_full)
        published: list[tuple[int, int]] = []
        for index in range(sequence.num_published_blocks, num_full):
            block, parent = sequence.block_table[index], sequence.published_content
            found = sequence.block_hashes[index], sequence.packed_block(index, self.block_size)
            sequence.published_content = self.pool.publish(block, parent, *found)
            published.append((block, sequence.published_content))
        sequence.num_published_blocks = max(sequence.num_published_blocks, num_full)
        sequence.record_place = 0
        return published

    def confirm_plan(
        self, number: int, published: list[tuple[int, int]], checkpoints: list[tuple[int, int]]
    ) -> None:
        """Record that a plan has run, so that its blocks, checkpoints and copies are certain."""
        self.pool.confirm(published)
        if self.states:
            self.states.pool.confirm(checkpoints)
        if self.pool.offload:
            self.pool.offload.confirm(number)

    def unpublish(self, sequence: Sequence) -> None:
        """Hide all blocks of a sequence, prompt included, from other sequences."""
        self.pool.unpublish(sequence.block_hashes)
        if self.states:
            self.states.pool.unpublish(sequence.block_hashes)
        if self.records:
            for block in sequence.block_table:
                self.records.clear(block)

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Compute the hashes of the first blocks, as far as they are not known."""
        known = sequence.block_hashes
        for index in range(len(known), num_blocks):
            parent = known[-1] if known else hash_root(sequence.cache_salt)
            known.append(hash_block(parent, sequence.packed_block(index, self.block_size)))

    # ---- rollback, and recovery from worker failures -------------------------------------------

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Plan a sequence again from a position. Later KV is overwritten in place."""
        sequence.num_planned_tokens = num_tokens

    def restore(self, sequence: Sequence, first_lost: int) -> None:
        """Keep the block table and the confirmed positions. Prefill all later positions again.

        first_lost: number of the first plan that was lost.
        """
        if self.states:
            self.states.restore(sequence, first_lost)
        confirmed = sequence.num_confirmed_tokens
        self.roll_back(sequence, confirmed)
        sequence.num_computed_tokens = sequence.prefill_begin = confirmed
        sequence.num_prefill_tokens = len(sequence.token_ids)
        if not self.is_published(sequence, confirmed):  # blocks of plans in flight are hidden
            sequence.num_published_blocks = sequence.published_content = 0
            self.pool.confirm(self.publish(sequence, confirmed))

    def is_published(self, sequence: Sequence, num_computed: int) -> bool:
        """Return whether the sequence's published blocks are computed and still in the cache."""
        number = sequence.num_published_blocks
        if not 0 < number <= min(len(sequence.block_hashes), num_computed // self.block_size):
            return False
        return self.pool.holds(sequence.block_hashes[number - 1], sequence.published_content)

    def resume(self, sequence: Sequence, ranges: list[tuple[int, int]]) -> bool:
        """Return whether a restored sequence can continue with the next workers.

        ranges: as in `StateBlocks.resume`.
        """
        position = sequence.num_planned_tokens
        return self.states is None or self.states.resume(sequence, position, ranges)

    def hide(
        self, published: Iterable[tuple[int, int]], checkpoints: Iterable[tuple[int, int]]
    ) -> None:
        """Hide content of a plan in flight, which is uncertain after a worker failure."""
        self.pool.hide(block for block, _ in published)
        if self.states:
            self.states.pool.hide(block for block, _ in checkpoints)

    def lose_copies(self) -> None:
        """Forget the copies of plans in flight. No sequence may still wait for such a copy."""
        if self.pool.offload:
            self.pool.offload.lose()
        for pool in self._pools:
            pool.forget_files()  # files that were to be written may be missing

    def forget(self, memory_id: int) -> None:
        """Clear the cache after the KV memory was replaced. No sequence may have blocks."""
        self.pool = self.pool.emptied(memory_id)
        if self.states:
            self.states.forget(self.pool, memory_id)

    # ---- the host tier -------------------------------------------------------------------------

    def use_host_tier(
        self,
        config: Config,
        replica: int,
        epoch: int,
        num_slots: int,
        num_pieces: int,
        memory_id: int,
    ) -> None:
        """Use the host tier of an epoch's workers, if all workers have a host tier."""
        if not num_slots or not self._caching:
            self.use_offload(None)
        elif self.offload is None or self.offload.memory_id != memory_id:
            if self.offload and self.offload.num_blocks:
                number = self.offload.num_blocks
                log.warning("host tier: its %d blocks ended with the workers", number)
            records = BlockRecords.open(f"slots.{replica}", num_slots, 0, memory_id)
            per_step = max(1, config.max_num_batched_tokens // self.block_size)
            index = OffloadIndex(num_slots, per_step, memory_id, records, num_pieces)
            self.use_offload(index)
            log.info("host tier: %d blocks, %d of them in use", num_slots, index.num_blocks)
        elif self.pool.offload is None:
            self.use_offload(self.offload)
        offload = self.pool.offload
        is_listed = offload and offload.folder and offload.folder.epoch == epoch
        if config.kv_offload_folder and offload and not is_listed:
            offload.use_folder(FolderIndex(epoch, config.tp))

    def use_offload(self, offload: OffloadIndex | None) -> None:
        """Use a host tier's index, or no index while the workers have no host tier."""
        self.offload = offload or self.offload
        for pool in self._pools:
            pool.offload = offload

    def load(self, sequence: Sequence, overlapped: bool) -> None:
        """Plan copies of KV from the host, which run with (`overlapped`) or before the step."""
        if self.pool.offload:
            self.pool.offload.load_blocks(sequence, overlapped)

    def take_copies(self, epoch: int, number: int) -> CopyBlocks | None:
        """Return the copies that workers must get before a plan, if any."""
        offload = self.pool.offload
        if not offload:
            return None
        for pool in self._pools:
            pool.store_ahead(offload)
        return offload.flush(epoch, number)

    @property
    def num_unsaved_blocks(self) -> int:
        """Number of blocks, slots and files that are to be written to the folder, if any."""
        if self.offload is None:
            return 0
        return self.offload.num_unsaved + sum(pool.num_unsaved for pool in self._pools)

    def save(self) -> bool:
        """Plan to write what has no file yet. Return whether a plan must bring copies for it."""
        offload = self.pool.offload
        if offload is None or offload.folder is None:
            return False
        for pool in self._pools:
            pool.save()
        offload.save_slots()
        return offload.has_copies

    def take_folder_request(self, epoch: int) -> FolderRequest | None:
        """Return the folder request that workers must get after a plan, if any."""
        return self.pool.offload.take_request(epoch) if self.pool.offload else None

    def on_report(self, report: FolderReport) -> None:
        """Record the files that workers have read or failed to read."""
        if self.offload:
            self.offload.on_report(report)
