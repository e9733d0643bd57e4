"""Records of steps: the layout that `penstock.kernels.step.apply_plan` describes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.layouts import step as layout
from penstock.kernels.layouts.forward_batch import SMALL_TILE, BatchShape, tile_size
from penstock.kernels.layouts.step import APPENDED, HEADER, PARAMETERS, ROW
from penstock.protocol.messages.plan import RowAdded

Integers = NDArray[np.int64]
Record = NDArray[np.int32]


class Rows(NamedTuple):
    """Rows of a step: rows that decode, then rows that prefill, both in ascending order of slot."""

    record: Record
    table: Record  # the rows of the record, [num_rows, 8]
    shape: BatchShape
    sampled: Integers  # indices of the rows that sample, in ascending order of slot, then position

    @property
    def follows_last_step(self) -> bool:
        """True if a row continues with the token that the last step has sampled."""
        return bool((self.table[:, layout.TOKEN_INDEX] == -1).any())


class Changes(NamedTuple):
    """Changes of slots, sent with the next record."""

    appended: list[Record]  # (slot, column, block id)
    parameters: list[Record]  # sampling parameters

    def clear(self) -> None:
        self.appended.clear()
        self.parameters.clear()

    def forget(self, slots: Integers) -> None:
        """Drop the changes of slots whose rows leave."""
        self.parameters[:] = [entry for entry in self.parameters if entry[0] not in slots]
        entries = [appended.reshape(-1, APPENDED) for appended in self.appended]
        self.appended[:] = [entry[~np.isin(entry[:, 0], slots)].ravel() for entry in entries]


def make_record(num_rows: int, changes: Changes, token_ids: list[Record]) -> tuple[Record, Record]:
    """Return a record with all parts except the rows, and the rows to be filled, [num_rows, 8]."""
    parts = *changes.appended, *changes.parameters, *token_ids
    num_appended = sum(map(len, changes.appended))
    num_parameters = sum(map(len, changes.parameters))
    end = HEADER + num_rows * ROW
    record: Record = np.empty(end + sum(map(len, parts)), np.int32)
    record[:HEADER] = (
        *(num_rows, num_appended // APPENDED, num_parameters // PARAMETERS, HEADER),
        *(end, end + num_appended, end + num_appended + num_parameters, 0),
    )
    if parts:
        np.concatenate(parts, out=record[end:])
    changes.clear()
    return record, record[HEADER:end].reshape(num_rows, ROW)


class DecodingRows:
    """Rows of steps that only decode, each the token sampled last, while no row comes or leaves."""

    def __init__(self, slots: Integers, lengths: Integers) -> None:
        """Keep the rows; lengths: in tokens, so far."""
        num_rows = len(slots)
        # `ends`: the rows' lengths after the last step
        self.slots, self.ends = slots, lengths.copy()
        self._order = np.arange(num_rows)
        self.steps_left = 0  # steps for which the rows' blocks are known to have room
        self._longest = int(lengths.max())
        self._record, rows = make_record(num_rows, Changes([], []), [])
        rows[:, layout.SLOT] = rows[:, layout.SAMPLING_SLOT] = slots
        rows[:, layout.START], rows[:, layout.COUNT] = lengths - 1, 1
        rows[:, layout.FIRST], rows[:, layout.TOKEN_INDEX] = self._order, -1
        rows[:, layout.FIRST_KEY], rows[:, layout.UNUSED] = lengths.cumsum() - lengths, 0
        self._positions, self._bounds = rows[:, layout.START], rows[:, layout.FIRST_KEY]

    def step(self, changes: Changes) -> Rows:
        """Return the next step; the changes go with it."""
        self.steps_left -= 1
        self._longest += 1
        self.ends += 1
        self._positions += 1
        self._bounds += self._order
        num_rows = len(self.slots)
        if changes.appended or changes.parameters:
            record, rows = make_record(num_rows, changes, [])
            rows[:] = self._record[HEADER:].reshape(num_rows, ROW)
        else:
            record = self._record.copy()
            rows = record[HEADER:].reshape(num_rows, ROW)
        shape = BatchShape(num_rows, num_rows, num_rows, 0, SMALL_TILE, 1, self._longest)
        return Rows(record, rows, shape, self._order)


def shape_of(counts: Integers, num_decode: int, max_seqlen_k: int) -> BatchShape:
    """Return the shape of a step; counts: tokens of each row."""
    longest = int(counts.max())
    size = tile_size(longest)
    return BatchShape(
        num_rows=len(counts),
        num_tokens=int(counts.sum()),
        num_decode=num_decode,
        num_tiles=int((-(-counts[num_decode:] // size)).sum()),
        tile_size=size,
        max_seqlen_q=longest,
        max_seqlen_k=max_seqlen_k,
    )


def parameters_of(row: RowAdded) -> Record:
    """Return the sampling parameters of a row."""
    entry = np.zeros(PARAMETERS, np.int32)
    entry[0], entry[2] = row.slot, row.top_k
    entry[[1, 3, 4]] = np.array([row.temperature, row.top_p, row.min_p], np.float32).view(np.int32)
    entry[5:7] = np.array([row.seed], "<i8").view(np.int32)
    return entry


def integers(data: bytes) -> Integers:
    """Return the integers that `pack` of `protocol.messages.packed` packed, as int64."""
    return np.frombuffer(data, "<i4").astype(np.int64)


def check_range(name: str, values: Integers, limit: int) -> None:
    """Raise ValueError unless all values are in [0, limit)."""
    wrong = (values < 0) | (values >= limit)
    if wrong.any():
        raise ValueError(f"{name}: got {values[wrong][0]}, expected 0 to {limit - 1}")
