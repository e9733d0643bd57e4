"""Steps whose rows all decode: each continues the last one's record."""

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.services.worker.persistent_batch import PersistentBatch, Rows
from tests.services.worker.plans import plan, row


class FromScratch(PersistentBatch):
    """Builds each step that only decodes as a step with chunks is built."""

    def _advance_decoding(self) -> Rows | None:
        slots = np.flatnonzero(self._decodes() & ~self._is_paused)
        if not slots.size:
            return None
        ends = self._num_computed[slots] + 1
        self._check_room(slots, ends)
        rows = self._rows(slots, np.ones_like(slots), ends, np.full_like(slots, -1))
        self._num_computed[slots] = ends
        return rows


PLANS = {
    "begin": plan(
        added=[row(0, range(4), [0, 1, 2]), row(5, range(6), [6, 7, 8])], chunks=[(0, 4), (5, 6)]
    ),
    "decode": plan(),
    "add": plan(added=[row(1, range(3), [3, 4])], chunks=[(1, 3)]),
    "add without a chunk": plan(added=[row(2, range(2), [9])]),
    "remove": plan(removed=[1]),
    "append": plan(appended=[(0, 5)]),
    "draft": plan(drafts=[(5, 6, [-1, 7])]),
    "accept": plan(drafts=[(5, 7, [8])]),
    "clear": None,
}


def take(batch: PersistentBatch, name: str) -> list[Any] | None:
    """Return what a step consists of, or that its plan is refused."""
    chosen = PLANS[name]
    if chosen is None:
        batch.clear()
        return []
    try:
        batch.apply(chosen)
        rows = batch.advance(chosen.chunks, chosen.drafts)
    except ValueError as error:
        return [str(error)]
    return rows and [rows.record.tolist(), rows.table.tolist(), rows.shape, rows.sampled.tolist()]


@example(["add", "decode", "remove", "decode"])
@given(st.lists(st.sampled_from(["decode"] * 5 + [*PLANS]), max_size=30))
def test_a_decoding_step_continues_the_last_one(names: list[str]) -> None:
    batches = [kind(8, 4, 4, 20, 100) for kind in (PersistentBatch, FromScratch)]
    for name in ["begin", *names]:
        one, other = (take(batch, name) for batch in batches)
        assert one == other
