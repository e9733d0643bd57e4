"""The recurrent state of sequences, in state blocks of the workers' memory.

The state of all layers after some tokens fills a state block. Unlike KV, a state can't be cut at an
earlier token, and each step overwrites it. So a running sequence has two blocks: a step reads one
and writes the other (`penstock.kernels.layouts.states`). A *checkpoint* is a block that stays as it
is, for the prefix cache: the sequence that wrote it goes on with another block. Nothing is copied,
neither for a checkpoint nor for a sequence that begins at one.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import lcm

from penstock.protocol.messages.plan import STATE_CHUNK
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.block_records import ROOT
from penstock.services.scheduler.blocks.places import MOVES_PER_PLAN, Places
from penstock.services.scheduler.sequence import Sequence

NONE = -1
LOADED = -2  # in place of a plan's number: the block gets a checkpoint from the host
# tokens before the last message that are worth a checkpoint, which takes the memory of the KV of
# 3,072 tokens of 27B
MIN_SAVED = 1024
MAX_MESSAGE = 8192  # tokens at the end of a prompt among which its last message is searched


class StateBlocks:
    """State blocks of running sequences, and checkpoints by the hash of the prefix before them.

    Every running sequence may have two blocks at any time; other blocks hold checkpoints, of which
    the least recently used is evicted.
    """

    _places: Places | None = None  # if KV blocks and state blocks share their memory

    def __init__(
        self, pool: BlockPool, block_size: int, kv: BlockPool, blocks_per_state: int
    ) -> None:
        """Use the blocks of `pool`, which may share memory with the KV blocks in `kv`.

        block_size: tokens of a KV block. blocks_per_state: as `WorkerState.blocks_per_state`.
        """
        self.pool = pool
        pool.has_states = True
        # positions of checkpoints are multiples of this number of tokens
        self.unit = lcm(STATE_CHUNK, block_size)
        self._block_size, self.blocks_per_state = block_size, blocks_per_state
        self._share_places(kv)

    def _share_places(self, kv: BlockPool) -> None:
        if self.blocks_per_state:
            self._places = Places(kv, self.pool, self.blocks_per_state)

    def forget(self, kv: BlockPool, memory_id: int) -> None:
        """Clear the cache after the memory was replaced. No sequence may have blocks."""
        self.pool = self.pool.emptied(memory_id)
        self._share_places(kv)

    @property
    def num_released(self) -> int:
        """Number of KV blocks in whose places state blocks became free."""
        return self.blocks_per_state * self.pool.num_released

    @property
    def has_room(self) -> bool:
        """True if another sequence may run."""
        num_more = self._places.num_unused if self._places else 0
        return self.pool.num_reserved + 2 <= self.pool.num_blocks + num_more

    def reserve(self, is_alone: bool) -> bool:
        """Reserve two blocks for another sequence. Return False if there are none for this plan.

        is_alone: no other sequence runs.
        """
        pool = self.pool
        while pool.num_reserved + 2 > pool.num_blocks:
            if not (self._places and self._places.give_states(is_alone=is_alone)):
                return False
        pool.num_reserved += 2
        return True

    def cancel(self) -> None:
        """Cancel a reservation."""
        self.pool.num_reserved -= 2

    def num_restorable(self, hashes: list[bytes], in_files: bool) -> int:
        """Return the number of full blocks before the last checkpoint among those with `hashes`.

        in_files: checkpoints in the folder count.
        """
        step, offload = self.unit // self._block_size, self.pool.offload

        def has(hash_: bytes) -> bool:
            is_there = self._find(hash_) != NONE
            return is_there or (offload is not None and offload.has_checkpoint(hash_, in_files))

        last = len(hashes) // step * step
        numbers = len(hashes), *range(last, 0, -step)  # the last block may be a sequence's own
        return next((n for n in numbers if n and has(hashes[n - 1])), 0)

    def has_last(self, hashes: list[bytes]) -> bool:
        """Return whether the last checkpoint that full blocks may have is in memory."""
        num_restorable = self.num_restorable(hashes, in_files=False)
        return (len(hashes) - num_restorable) * self._block_size < self.unit

    def missing(self, hashes: list[bytes]) -> list[bytes]:
        """Return the keys of the pieces of the checkpoint after the full blocks with `hashes`.

        The list is empty if the checkpoint is in a state block.
        """
        if not hashes or self._find(hashes[-1]) != NONE or not self.pool.offload:
            return []
        return [key for _, key in self.pool.offload.pieces(0, hashes[-1])]

    def allocate(
        self,
        sequence: Sequence,
        hashes: list[bytes],
        num_seen: int,
        is_own: bool,
        caching: bool,
    ) -> list[int]:
        """Let a sequence begin at the checkpoint after full blocks, or with a state of zeros.

        Its state blocks are reserved. hashes: of the full blocks.

        is_own: the state was kept for this sequence.

        The sequence will leave checkpoints where its prefix leaves the `num_seen` tokens that are
        already in the cache, at the end of its prompt, before its last token, and before the last
        message of a long chat.
        Return the places to which the caller must plan copies of what is `missing`.
        """
        hash_ = hashes[-1] if hashes else b""
        block, plan, places = self._find(hash_), NONE, []
        if block != NONE:
            self.pool.share([block])
        elif hash_ and self.pool.offload:
            block, plan = self.pool.take(), LOADED
            places = [place for place, _ in self.pool.offload.pieces(block, hash_)]
        if is_own:
            plan = NONE  # no checkpoint that `publish_loaded` could publish
        sequence.state_blocks, sequence.state_plans = (block, NONE), (plan, NONE)
        begin = len(hashes) * self._block_size
        end = min(len(sequence.token_ids) - 1, sequence.num_prompt_tokens)
        ends = (num_seen, end, *_border(sequence, begin, end)) if caching else ()
        sequence.checkpoints = [end // self.unit * self.unit for end in ends]
        return places

    def has_own(self, sequence: Sequence) -> bool:
        """Return whether steps since the admission have left a state that is no checkpoint.

        Before the first step the block may still be loading.
        """
        block, other = sequence.state_blocks
        has_run = other != NONE or sequence.state_plans[0] >= 0
        return has_run and block != NONE and self.pool.may_be_written(block)

    def free(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that was allocated."""
        self._release(sequence.state_blocks)
        self.pool.num_reserved -= 2
        self.pool.num_released += 2  # which may be lent from now on
        sequence.state_blocks, sequence.checkpoints = (NONE, NONE), []

    def chunk_end(self, sequence: Sequence, most: int) -> int:
        """Return the end of the next chunk, at most `most`; the chunk may be empty."""
        begin = sequence.num_planned_tokens
        end = min([most, *(position for position in sequence.checkpoints if position > begin)])
        if end < sequence.num_prefill_tokens:
            end = max(begin, end // self.unit * self.unit)
        return end

    def advance(self, sequences: Iterable[Sequence], number: int) -> list[int]:
        """Plan a step of each sequence. Return the blocks that workers do not know: `plan.states`.

        number: that of the plan.
        """
        named: list[int] = []
        for sequence in sequences:
            (read, written), (read_plan, plan) = sequence.state_blocks, sequence.state_plans
            if written != NONE and not self.pool.may_be_written(written):
                self.pool.release([written])  # a checkpoint, which the last step has read
                written = NONE
            if written == NONE:
                written, plan = self.pool.take(), number
                named.extend((sequence.slot, read, written))
            sequence.state_blocks, sequence.state_plans = (written, read), (plan, read_plan)
        if self._places:
            self._places.num_moves = MOVES_PER_PLAN  # of the next plan
        return named

    def publish_loaded(self, sequence: Sequence, hash_: bytes) -> list[tuple[int, int]]:
        """Publish the checkpoint that a sequence has loaded, if any, when it begins to compute.

        Parameters and result as in `publish`.
        """
        block, _ = sequence.state_blocks
        if sequence.state_plans[0] != LOADED:
            return []
        sequence.state_plans = NONE, NONE
        return [(block, self.pool.publish(block, ROOT, hash_, b""))]

    def publish(self, sequence: Sequence, hash_: bytes) -> tuple[int, int]:
        """Keep the state that the current plan writes as a checkpoint.

        hash_: of the prefix before the checkpoint. Return (block, number), for `pool.confirm`.
        """
        block, _ = sequence.state_blocks
        return block, self.pool.publish(block, ROOT, hash_, b"")

    # ---- after a worker failure ------------------------------------------------------------------

    def restore(self, sequence: Sequence, first_lost: int) -> None:
        """Keep the blocks that a sequence has written in plans before the plan `first_lost`.

        Other blocks may still have the state of another sequence.
        """
        pairs = zip(sequence.state_blocks, sequence.state_plans, strict=True)
        kept = [block if plan < first_lost else NONE for block, plan in pairs]
        self._release(set(sequence.state_blocks).difference(kept))
        sequence.state_blocks, sequence.state_plans = (kept[0], kept[1]), (NONE, NONE)

    def resume(self, sequence: Sequence, position: int, ranges: list[tuple[int, int]]) -> bool:
        """Continue after `position` from either block. Return False if neither is possible.

        ranges: of each block, positions (first and last) after which the workers can continue;
        empty if they do not know. The later part of an older block may be of wrong drafts, so the
        newer block is preferred.
        """
        found = (
            block
            for block in sequence.state_blocks
            if block != NONE and ranges and 0 <= ranges[block][0] <= position <= ranges[block][1]
        )
        block = max(found, key=lambda block: ranges[block][0], default=NONE)
        self._release(set(sequence.state_blocks).difference([block]))
        sequence.state_blocks = block, NONE
        return block != NONE

    def _find(self, hash_: bytes) -> int:
        found = self.pool.match([hash_])
        return found[0] if found else NONE

    def _release(self, blocks: Iterable[int]) -> None:
        self.pool.release([block for block in blocks if block != NONE])


def _border(sequence: Sequence, begin: int, end: int) -> Iterator[int]:
    """Yield where the last message of a chat begins, if that is far from `begin`.

    A message ends with an EOS token. The client may send another last message, or begin another
    conversation with the same instructions. end: of the prompt.
    """
    token_ids, eos = sequence.token_ids, sequence.end_token_ids
    positions = range(end, max(begin + MIN_SAVED, end - MAX_MESSAGE) - 1, -1)
    return islice((n for n in positions if token_ids[n - 1] in eos), 1, 2)
