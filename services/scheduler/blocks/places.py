"""Places of the workers' memory, each of which has KV blocks or a state block.

So KV blocks and state blocks have one budget. A pool takes a place of the other pool if it has no
free block, or instead of evicting content that was used later than that place.
"""

import math
from itertools import count

from penstock.services.scheduler.blocks.block_pool import BlockPool

# places of a plan whose KV is evicted while other sequences run and a host tier copies it: of 27B,
# 192 MiB a place
MOVES_PER_PLAN = 1


class Places:
    """The places that two pools share: state block i lies in the place of `size` KV blocks.

    At first all places have KV blocks, except those with recorded checkpoints.
    """

    def __init__(self, kv: BlockPool, states: BlockPool, size: int) -> None:
        """Share the memory of both pools, of which no block has a holder."""
        self._kv, self._states, self._size = kv, states, size
        kv.run = size
        self._least_used = 0  # no free state block was released before
        self.num_moves = MOVES_PER_PLAN  # that are left for the current plan
        kv.clock = states.clock = count(1 + kv.capacity + states.capacity)
        kv.before_take, states.before_take = self._before_kv, self._before_state
        kv.num_lent = self._num_lent
        recorded = {n for n in range(states.capacity) if states.has_content(n)}
        self._with_kv = set(range(states.capacity)) - recorded
        states.withdraw(self._with_kv)
        for place in recorded:
            kv.withdraw(self._blocks(place))

    def give_states(self, before: float = math.inf, is_alone: bool = False) -> bool:
        """Let the states have the place of KV blocks that was used least recently.

        before: it must have been used before. is_alone: no other sequence waits for copies of its
        content to the host. Return False if no place is free.
        """
        if not (self.num_moves or is_alone):
            return False
        kv = self._kv
        free = (n for n in self._with_kv if kv.is_free(self._blocks(n)))
        used, place = min(((self._last_use(n), n) for n in free), default=(math.inf, -1))
        if place < 0 or used >= before:
            return False
        self.num_moves -= kv.offload is not None and used > 0 and not is_alone
        self._with_kv.remove(place)
        kv.withdraw(self._blocks(place))
        self._states.take_up([place])
        self._least_used = 0
        return True

    def _blocks(self, place: int) -> range:
        return range(place * self._size, (place + 1) * self._size)

    def _last_use(self, place: int) -> int:
        """Return about when a place's KV was used last: its first or its last block."""
        used, blocks = self._kv.used, self._blocks(place)
        return max(used[blocks[0]], used[blocks[-1]])

    def _num_lent(self) -> int:
        """Return the number of KV blocks in whose places are state blocks that nobody needs."""
        states = self._states
        return self._size * min(states.num_own_free, states.num_blocks - states.num_reserved)

    def _before_kv(self) -> None:
        used = self._kv.next_used
        if used <= self._least_used or not self._num_lent():
            return
        self._least_used, place = min((self._states.used[n], n) for n in self._states.free_blocks())
        if self._least_used < used:
            self._states.withdraw([place])
            self._kv.take_up(self._blocks(place))
            self._with_kv.add(place)

    def _before_state(self) -> None:
        if used := self._states.next_used:
            self.give_states(used)
