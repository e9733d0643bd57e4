"""Places of the workers' memory, each of which has KV blocks or a state block.

So KV blocks and state blocks have one budget. A pool takes a place of the other pool if it has no
free block, or instead of evicting content that was used later than that place.
"""

import math
from array import array
from collections import OrderedDict
from itertools import count

from penstock.services.scheduler.blocks.block_pool import BlockPool

# places of a plan whose KV is evicted while other sequences run and a host tier copies it: of 27B,
# 192 MiB a place
MOVES_PER_PLAN = 1


class Places:
    """The places that two pools share: state block i lies in the place of `size` KV blocks.

    At first all places have KV blocks, except those with recorded checkpoints. Every operation
    takes O(1) per block.
    """

    def __init__(self, kv: BlockPool, states: BlockPool, size: int) -> None:
        """Share the memory of both pools, of which no block has a holder."""
        self._kv, self._states, self._size = kv, states, size
        self.num_moves = MOVES_PER_PLAN  # that are left for the current plan
        recorded = {n for n in range(states.capacity) if states.has_content(n)}
        states.order_as(kv)
        kv.run, kv.clock = size, count(1 + kv.capacity)
        states.clock = kv.clock
        kv.before_take, states.before_take = self._before_kv, self._before_state
        kv.on_hold, kv.on_free, kv.num_lent = self._hold, self._free, self._num_lent
        self._num_held = array("i", bytes(4 * states.capacity))  # KV blocks of each place
        # places with KV that nobody holds → time of the last use, ascending; 0: nothing to lose
        self._unused: OrderedDict[int, int] = OrderedDict()
        of_kv = [n for n in range(states.capacity) if n not in recorded]
        states.withdraw(of_kv)
        for used, place in sorted((max(kv.used[b] for b in self._blocks(n)), n) for n in of_kv):
            self._add_unused(place, used)
        for place in recorded:
            kv.withdraw(self._blocks(place))

    @property
    def num_unused(self) -> int:
        """Number of places with KV that nobody holds."""
        return len(self._unused)

    def give_states(self, before: float = math.inf, is_alone: bool = False) -> bool:
        """Let the states have the place of KV blocks that was used least recently.

        before: it must have been used before. is_alone: no other sequence waits for copies of its
        content to the host. Return False if no place is free.
        """
        place, used = next(iter(self._unused.items()), (-1, math.inf))
        if used >= before or not (self.num_moves or is_alone):
            return False
        self.num_moves -= self._kv.offload is not None and used > 0 and not is_alone
        del self._unused[place]
        self._kv.withdraw(self._blocks(place))
        self._states.take_up([place])
        return True

    def _blocks(self, place: int) -> range:
        return range(place * self._size, (place + 1) * self._size)

    def _add_unused(self, place: int, used: int) -> None:
        has_content = any(map(self._kv.has_content, self._blocks(place)))
        self._unused[place] = used * has_content
        self._unused.move_to_end(place, last=has_content)

    def _hold(self, block: int) -> None:
        place = block // self._size
        if not self._num_held[place]:
            del self._unused[place]
        self._num_held[place] += 1

    def _free(self, block: int) -> None:
        place = block // self._size
        self._num_held[place] -= 1
        if not self._num_held[place]:
            self._add_unused(place, self._kv.used[block])

    def _num_lent(self) -> int:
        """Return the number of KV blocks in whose places are state blocks that nobody needs."""
        states = self._states
        return self._size * min(states.num_own_free, states.num_blocks - states.num_reserved)

    def _before_kv(self) -> None:
        states = self._states
        if (used := self._kv.next_used) and states.next_used < used and self._num_lent():
            place = next(states.free_blocks())
            states.withdraw([place])
            self._kv.take_up(self._blocks(place)[::-1])
            self._add_unused(place, 0)

    def _before_state(self) -> None:
        if used := self._states.next_used:
            self.give_states(used)
