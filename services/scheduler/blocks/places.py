"""Places of the workers' memory, each of which has KV blocks or a state block.

So KV blocks and state blocks have one budget. A pool takes a place of the other pool if it has no
free block, or instead of evicting content that was used later than that place.
"""

import math
from collections import Counter
from itertools import count

from penstock.services.scheduler.blocks.block_pool import BlockPool


class Places:
    """The places that two pools share: state block i lies in the place of `size` KV blocks.

    At first all places have KV blocks, except those with recorded checkpoints.
    """

    def __init__(self, kv: BlockPool, states: BlockPool, size: int) -> None:
        """Share the memory of both pools, of which no block has a holder."""
        self._kv, self._states, self._size = kv, states, size
        self._num_released = -1  # `kv.num_released` when no place was free
        self._least_used = 0.0  # no free state block was released before
        kv.clock = states.clock = count(1 + kv.capacity + states.capacity)
        kv.before_take, states.before_take = self._before_kv, self._before_state
        kv.num_lent = self._num_lent
        for place in range(states.capacity):
            if states.has_content(place):
                kv.withdraw(self._blocks(place))
            else:
                states.withdraw([place])

    def give_states(self, before: float = math.inf) -> bool:
        """Let the states have the place of KV blocks that was used least recently.

        before: it must have been used before. Return False if no place is free.
        """
        if self._num_released == self._kv.num_released:
            return False
        free: Counter[int] = Counter()
        for block, used in self._kv.free_blocks():
            place = block // self._size
            if used < before:
                free[place] += 1
            elif self._kv.has_content(block):
                return False
            if free[place] == self._size:
                self._kv.withdraw(self._blocks(place))
                self._states.take_up([place])
                return True
        self._num_released = self._kv.num_released
        return False

    def _blocks(self, place: int) -> range:
        return range(place * self._size, (place + 1) * self._size)

    def _num_lent(self) -> int:
        """Return the number of KV blocks in whose places are state blocks that nobody needs."""
        states = self._states
        return self._size * min(states.num_own_free, states.num_blocks - states.num_reserved)

    def _before_kv(self) -> None:
        used = self._kv.next_used
        if used <= self._least_used or not self._num_lent():
            return
        self._least_used, place = min((time, n) for n, time in self._states.free_blocks())
        if self._least_used < used:
            self._states.withdraw([place])
            self._kv.take_up(self._blocks(place))
            self._num_released = -1

    def _before_state(self) -> None:
        if used := self._states.next_used:
            self.give_states(used)
