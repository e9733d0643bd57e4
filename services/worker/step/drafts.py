"""Drafts of a plan: rows that verify guessed tokens, in addition to the rows that decode."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.services.worker.step.step_record import Integers, check_range, integers

Flags = NDArray[np.bool_]


class Decoding(NamedTuple):
    """Rows of a step that decode, one token each, sorted by slot, then position."""

    slots: Integers
    positions: Integers
    token_ids: Integers  # -1: the token sampled last


def drafted_rows(
    drafts: bytes,
    decodes: Flags,
    is_paused: Flags,
    firsts: Integers,
    lasts: Integers,
    vocab_size: int,
) -> list[Decoding]:
    """Return the rows of each draft; their slots do not decode otherwise, and may be paused.

    drafts: as in `BatchPlan`; firsts, lasts: positions at which the draft of a slot may begin.
    Changes `decodes` and `is_paused`. Raises ValueError.
    """
    drafted = []
    for slot, position, token_ids in _split(drafts):
        if not (0 <= slot < len(decodes) and decodes[slot]):
            raise ValueError(f"draft: got slot {slot} twice, or without a row that decodes")
        least, most = firsts[slot], lasts[slot]
        if not least <= position <= most:
            raise ValueError(f"draft of slot {slot}: got {position}, expected {least} to {most}")
        has_token = position == most and not is_paused[slot]
        explicit = token_ids[1:] if has_token and token_ids[0] == -1 else token_ids
        check_range(f"drafted token of slot {slot}", explicit, vocab_size)
        decodes[slot] = False
        is_paused[slot] = len(token_ids) > 1
        positions = position + np.arange(len(token_ids))
        drafted.append(Decoding(np.full_like(positions, slot), positions, token_ids))
    return drafted


def merged(plain: Decoding, drafted: list[Decoding]) -> Decoding:
    """Return all rows in one."""
    rows = [np.concatenate(columns) for columns in zip(plain, *drafted, strict=True)]
    order = np.argsort(rows[0], kind="stable")
    return Decoding(*(column[order] for column in rows))


def _split(drafts: bytes) -> Iterator[tuple[int, int, Integers]]:
    """Yield slot, position and token ids of each draft."""
    left = integers(drafts)
    while left.size:
        count = int(left[2]) if left.size > 2 else 0
        if not 0 < count <= left.size - 3:
            raise ValueError(f"draft: got {count} tokens, expected 1 to {left.size - 3}")
        yield int(left[0]), int(left[1]), left[3 : 3 + count]
        left = left[3 + count :]
