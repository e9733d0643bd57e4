"""Records of a scheduler that dies between two of its stores, or within one that is long."""

import math
from typing import Any

from penstock.services.scheduler.blocks.block_records import BlockRecords


class SchedulerDiedError(Exception):
    """The effect is that of SIGKILL."""


class Life:
    """The number of stores that a scheduler has left."""

    def __init__(self) -> None:
        self.num_stores = math.inf

    def spend(self) -> None:
        self.num_stores -= 1
        if self.num_stores < 0:
            raise SchedulerDiedError


class MortalView:
    """A view of the memory; of a slice, the last store of a life writes a part."""

    def __init__(self, view: Any, life: Life) -> None:
        self._view, self._life = view, life
        self.nbytes = view.nbytes

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            self._life.spend()
        except SchedulerDiedError:
            if isinstance(key, slice):
                half = len(value) // 2
                self._view[key.start : key.start + half] = value[:half]
            raise
        self._view[key] = value

    def __iter__(self) -> Any:
        return iter(self._view)


class MortalRecords(BlockRecords):
    """Records in memory that outlives them."""

    def __init__(self, memory: bytearray, *sizes: int, life: Life) -> None:
        super().__init__(memory, *sizes)
        views: Any = self
        for name in ("_bytes", "_memory_id", "_numbers", "_parents", "tokens"):
            setattr(views, name, MortalView(getattr(self, name), life))
