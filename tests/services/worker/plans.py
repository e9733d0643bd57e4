"""Plans by hand, from lists."""

from collections.abc import Iterable
from itertools import chain

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import BLOCK_BITS, BatchPlan, RowAdded, RowExtras

Pairs = Iterable[tuple[int, int]]


def plan(
    step: int = 0,
    *,
    epoch: int = 1,
    removed: Iterable[int] = (),
    added: Iterable[RowAdded] = (),
    appended: Pairs = (),
    chunks: Pairs = (),
    drafts: Iterable[tuple[int, int, list[int]]] = (),
) -> BatchPlan:
    """Return a plan.

    appended: (slot, block id), chunks: (slot, number of tokens), drafts: (slot, position, tokens).
    """
    appended_ids = pack(slot << BLOCK_BITS | block_id for slot, block_id in appended)
    chunk_ids = pack(chain.from_iterable(chunks))
    draft_ids = pack(n for slot, at, ids in drafts for n in (slot, at, len(ids), *ids))
    return BatchPlan(epoch, step, pack(removed), list(added), appended_ids, chunk_ids, draft_ids)


def row(
    slot: int,
    token_ids: Iterable[int],
    block_ids: Iterable[int],
    num_computed_tokens: int = 0,
    *,
    seed: int = 0,
    extras: RowExtras | None = None,
    **sampling: float,
) -> RowAdded:
    """Return a row; sampling: its numbers, which make it greedy if nothing else is said."""
    return RowAdded(
        slot,
        pack(token_ids),
        pack(block_ids),
        num_computed_tokens,
        sampling,
        seed,
        extras,
    )
