"""The persistent batch: the row of every slot, kept between steps.

The host knows all lengths without reading from the device, because each step adds a known number of
tokens to a row. The tensors of the model and the sampler stay on the device. Each step updates
these tensors with a record, which `penstock.kernels.step.apply_plan` describes.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.layouts import step as layout
from penstock.kernels.layouts.forward_batch import SMALL_TILE, BatchShape, tile_size
from penstock.kernels.layouts.sampling import NEUTRAL_WORDS, write_numbers
from penstock.kernels.layouts.states import pack_states
from penstock.kernels.layouts.step import APPENDED, HEADER, PARAMETERS, ROW
from penstock.protocol.messages.plan import BLOCK_BITS, MAX_BLOCKS, BatchPlan, RowAdded

Integers = NDArray[np.int64]
Record = NDArray[np.int32]


class Rows(NamedTuple):
    """The rows of a step: decode rows, then prefill rows, both in ascending order of slot."""

    record: Record
    table: Record  # the rows of the record, [num_rows, ROW]
    shape: BatchShape
    sampled: Integers  # indices of the rows that sample, ordered by slot, then position

    @property
    def follows_last_step(self) -> bool:
        """True if any row's input is a token that the last step has sampled."""
        return bool((self.table[:, layout.TOKEN_INDEX] == -1).any())

    def inputs(self, order: Integers) -> Integers:
        """Return the input tokens of decode rows that name theirs, otherwise -1."""
        index = self.table[order, layout.TOKEN_INDEX]
        named = np.where(index < -1, self.record[layout.TOKENS] - 2 - index, 0)
        found: Integers = np.where(index < -1, self.record[named], -1)
        return found


class Changes(NamedTuple):
    """The changes of slots that the next record will contain."""

    appended: list[Record]  # (slot, column, block id)
    parameters: dict[int, Record]  # slot → the slot number, then its words in the slot table

    def clear(self) -> None:
        self.appended.clear()
        self.parameters.clear()

    def forget(self, slots: Integers) -> None:
        """Drop the changes of slots whose rows are removed."""
        for slot in slots.tolist():
            self.parameters.pop(slot, None)
        entries = [appended.reshape(-1, APPENDED) for appended in self.appended]
        self.appended[:] = [entry[(entry[:, :1] != slots).all(1)].ravel() for entry in entries]


def make_record(num_rows: int, changes: Changes, token_ids: list[Record]) -> tuple[Record, Record]:
    """Return a record, and its rows to be filled, [num_rows, ROW]. All other parts are filled."""
    parts = *changes.appended, *changes.parameters.values(), *token_ids
    num_appended = sum(map(len, changes.appended))
    num_parameters = len(changes.parameters) * PARAMETERS
    end = HEADER + num_rows * ROW
    record: Record = np.empty(end + sum(map(len, parts)), np.int32)
    record[:HEADER] = (
        *(num_rows, num_appended // APPENDED, len(changes.parameters), HEADER),
        *(end, end + num_appended, end + num_appended + num_parameters, 0),
    )
    if parts:
        np.concatenate(parts, out=record[end:])
    changes.clear()
    return record, record[HEADER:end].reshape(num_rows, ROW)


class DecodingRows:
    """The rows of consecutive decode steps with the same sequences and no drafts."""

    def __init__(self, slots: Integers, lengths: Integers) -> None:
        """Keep the rows with their present lengths in tokens."""
        num_rows = len(slots)
        # `ends`: lengths of the rows after the last step
        self.slots, self.ends = slots, lengths.copy()
        self._order = np.arange(num_rows)
        self.steps_left = 0  # steps for which all rows have room in their blocks
        self._longest = int(lengths.max())
        self._record, rows = make_record(num_rows, Changes([], {}), [])
        rows[:, layout.SLOT] = rows[:, layout.SAMPLING_SLOT] = slots
        rows[:, layout.START], rows[:, layout.COUNT] = lengths - 1, 1
        rows[:, layout.FIRST], rows[:, layout.TOKEN_INDEX] = self._order, -1
        rows[:, layout.FIRST_KEY] = lengths.cumsum() - lengths
        rows[:, layout.PROMPT_END] = 0
        self._positions, self._bounds = rows[:, layout.START], rows[:, layout.FIRST_KEY]

    def step(self, changes: Changes, states: Integers | int) -> Rows:
        """Return the rows of the next step, whose record contains `changes`.

        states: packed state blocks of the rows; 0 without recurrent state.
        """
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
        rows[:, layout.STATES] = states
        shape = BatchShape(num_rows, num_rows, num_rows, 0, SMALL_TILE, 1, self._longest)
        return Rows(record, rows, shape, self._order)


def shape_of(counts: Integers, num_decode: int, max_seqlen_k: int) -> BatchShape:
    """Return the shape of a step from the number of tokens of each row."""
    longest, num_tokens = int(counts.max()), int(counts.sum())
    size = tile_size(num_tokens, num_decode, len(counts) - num_decode)
    return BatchShape(
        num_rows=len(counts),
        num_tokens=num_tokens,
        num_decode=num_decode,
        num_tiles=int((-(-counts[num_decode:] // size)).sum()),
        tile_size=size,
        max_seqlen_q=longest,
        max_seqlen_k=max_seqlen_k,
    )


def integers(data: bytes) -> Integers:
    """Unpack integers, as `unpack` of `protocol.messages.packed` does, but as int64."""
    return np.frombuffer(data, "<i4").astype(np.int64)


def check_range(name: str, values: Integers, limit: int) -> None:
    """Raise ValueError unless all values are in [0, limit)."""
    wrong = (values < 0) | (values >= limit)
    if wrong.any():
        raise ValueError(f"{name}: got {values[wrong][0]}, expected 0 to {limit - 1}")


Flags = NDArray[np.bool_]


class Decoding(NamedTuple):
    """The decode rows of a step, each with one token, sorted by slot, then position."""

    slots: Integers
    positions: Integers
    token_ids: Integers  # -1: the last sampled token


def drafted_rows(
    drafts: bytes,
    decodes: Flags,
    is_paused: Flags,
    firsts: Integers,
    lasts: Integers,
    vocab_size: int,
) -> list[Decoding]:
    """Return the decode rows of each draft.

    Clears `decodes` of the drafts' slots, which get no other decode row, and sets their
    `is_paused`. Raises ValueError for an invalid draft.
    drafts: as in `BatchPlan`. firsts, lasts: range of positions at which a slot's draft may begin.
    """
    drafted = []
    for slot, position, token_ids in split_drafts(drafts):
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
    """Return plain and drafted rows together, sorted by slot."""
    rows = [np.concatenate(columns) for columns in zip(plain, *drafted, strict=True)]
    order = np.argsort(rows[0], kind="stable")
    return Decoding(*(column[order] for column in rows))


def split_drafts(drafts: bytes) -> Iterator[tuple[int, int, Integers]]:
    """Yield (slot, position, token ids) of each draft. Raises ValueError."""
    left = integers(drafts)
    while left.size:
        count = int(left[2]) if left.size > 2 else 0
        if not 0 < count <= left.size - 3:
            raise ValueError(f"draft: got {count} tokens, expected 1 to {left.size - 3}")
        yield int(left[0]), int(left[1]), left[3 : 3 + count]
        left = left[3 + count :]


class PersistentBatch:
    """The host's state of the rows, by slot. Only plans change the rows."""

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        num_state_blocks: int = 0,
    ) -> None:
        """Make an empty batch, with up to `max_blocks` of the cache's `num_blocks` in a row."""
        self.num_slots, self.block_size = num_slots, block_size
        self.num_blocks = num_blocks
        self.max_blocks = max_blocks
        self.vocab_size = vocab_size
        self._active = np.zeros(num_slots, np.bool_)
        self._num_row_blocks = np.zeros(num_slots, np.int64)
        self._num_prefill_tokens = np.zeros(num_slots, np.int64)
        self._num_computed = np.zeros(num_slots, np.int64)
        self._prompt_ends = np.zeros(num_slots, np.int64)
        self.num_state_blocks = num_state_blocks
        # state blocks that a row's next step reads and writes
        self._states = np.full((num_slots, 2), -1, np.int64)
        # True if a row computes nothing until a draft includes its slot
        self._is_paused = np.zeros(num_slots, np.bool_)
        # slot → prefill tokens, until all of them are computed
        self._prefill_tokens: dict[int, Record] = {}
        self._changes = Changes([], {})
        # rows of the last step; None if rows were added, removed or changed since
        self._decoding_rows: DecodingRows | None = None

    def clear(self) -> None:
        self._active[:] = False
        self._decoding_rows = None
        self._prefill_tokens.clear()
        self._changes.clear()

    def apply(self, plan: BatchPlan) -> None:
        """Remove rows, add rows, append blocks. Raises ValueError for an invalid plan."""
        if plan.removed:
            removed = integers(plan.removed)
            self._check_active(removed)
            self._active[removed] = False
            self._decoding_rows = None
            self._changes.forget(removed)
        if plan.added:
            tables = [self._add(row) for row in plan.added]
            slots = [row.slot for row in plan.added]
            self._append(np.repeat(slots, list(map(len, tables))), np.concatenate(tables))
        if plan.appended:
            appended = integers(plan.appended)
            self._append(appended >> BLOCK_BITS, appended & (MAX_BLOCKS - 1))
        if plan.states:
            named = integers(plan.states).reshape(-1, 3)
            self._check_active(named[:, 0])
            check_range("state block to read, plus 1", named[:, 1] + 1, self.num_state_blocks + 1)
            check_range("state block to write", named[:, 2], self.num_state_blocks)
            self._states[named[:, 0]] = named[:, 1:]

    def set_numbers(self, slot: int, numbers: Mapping[str, float]) -> None:
        """Set columns of the slot table for a row that the last plan added. Raises ValueError."""
        write_numbers(self._changes.parameters[slot][1:], numbers)

    def advance(self, chunks: bytes, drafts: bytes = b"") -> Rows | None:
        """Return the rows of the next step, and count them as computed; None without rows.

        Each token of a draft becomes a row. A chunk of one token becomes a decode row; with
        recurrent state only a sampled token, since prompts have another order of arithmetic. Raises
        ValueError for an invalid plan. chunks, drafts: as in `BatchPlan`.
        """
        if not chunks and not drafts:
            return self._advance_decoding()
        self._decoding_rows = None
        prefilling, lengths = integers(chunks).reshape(-1, 2).T
        self._check_chunks(prefilling, lengths)
        decoding = self._decoding(drafts)
        prompt_ends = self._prompt_ends[prefilling] if self.num_state_blocks else 0
        is_single = (lengths == 1) & (self._num_computed[prefilling] >= prompt_ends)
        if is_single.any():  # decode rows are faster
            decoding = merged(decoding, [self._single(prefilling[is_single])])
            prefilling, lengths = prefilling[~is_single], lengths[~is_single]
        order = np.argsort(prefilling)
        slots = np.concatenate([decoding.slots, prefilling[order]])
        if not slots.size:
            return None
        if len(slots) > len(self._active):
            raise ValueError(f"rows: got {len(slots)}, expected at most {len(self._active)}")
        counts = np.concatenate([np.ones_like(decoding.slots), lengths[order]])
        begins = np.concatenate([decoding.positions, self._num_computed[prefilling[order]]])
        ends = begins + counts
        self._check_room(slots, ends)
        rows = self._rows(slots, counts, ends, decoding.token_ids)
        self._num_computed[slots] = ends  # of equal slots, the last position remains
        return rows

    def followers(self, rows: Rows) -> Record:
        """Return facts about the tokens that follow the rows of the last step, [num_rows, 2].

        The first is the token after the row, -1 if the row samples it; the second the number of
        positions for which the row has blocks.
        """
        slots = rows.table[:, layout.SLOT]
        room = self._num_row_blocks[slots] * self.block_size
        found: Record = np.stack([np.full_like(room, -1), room], 1).astype(np.int32)
        for slot, token_ids in self._prefill_tokens.items():
            found[slots == slot, 0] = token_ids[self._num_computed[slot]]
        return found

    def _advance_decoding(self) -> Rows | None:
        """Return the rows of a step without chunks and drafts, which is the fast and usual case."""
        rows = self._decoding_rows
        if rows is None:
            slots = np.flatnonzero(self._decodes() & ~self._is_paused)
            if not slots.size:
                return None
            rows = self._decoding_rows = DecodingRows(slots, self._num_computed[slots])
        if not rows.steps_left:
            self._check_room(rows.slots, rows.ends + 1)
            room = self._num_row_blocks[rows.slots] * self.block_size
            rows.steps_left = int((room - rows.ends).min())
        step = rows.step(self._changes, self._take_states(rows.slots))
        self._num_computed[rows.slots] = rows.ends
        return step

    def _take_states(self, slots: Integers) -> Integers | int:
        """Return the packed state blocks of a step's rows, and exchange them for the next step.

        Return 0 without recurrent state.
        """
        if not self.num_state_blocks:
            return 0
        packed: Integers = pack_states(*self._states[slots].T)
        if (self._states[slots, 1] < 0).any():
            raise ValueError("states: got a step of a row without a state block to write")
        self._states[slots] = self._states[slots, ::-1]
        return packed

    def _decodes(self) -> NDArray[np.bool_]:
        return self._active & (self._num_computed >= self._num_prefill_tokens)

    def _decoding(self, drafts: bytes) -> Decoding:
        decodes, drafted = self._decodes(), None
        if drafts:
            limits = self._num_prefill_tokens, self._num_computed
            drafted = drafted_rows(drafts, decodes, self._is_paused, *limits, self.vocab_size)
        slots = np.flatnonzero(decodes & ~self._is_paused)
        plain = Decoding(slots, self._num_computed[slots], np.full_like(slots, -1))
        return plain if drafted is None else merged(plain, drafted)

    def _single(self, slots: Integers) -> Decoding:
        """Return the decode rows of chunks with one token."""
        taken, _ = self._take_prefill_tokens(slots, np.ones_like(slots))
        return Decoding(slots, self._num_computed[slots], np.concatenate(taken, dtype=np.int64))

    def _add(self, row: RowAdded) -> Integers:
        """Add a row. Return its block table, which the caller must append."""
        slot, given, block_ids = row.slot, integers(row.token_ids), integers(row.block_ids)
        skipped, num_computed = row.num_skipped, row.num_computed_tokens
        num_tokens = skipped + len(given)
        if not 0 <= slot < len(self._active) or self._active[slot]:
            raise ValueError(f"slot: got {slot}, expected a free slot below {len(self._active)}")
        room = len(block_ids) * self.block_size
        if not 0 <= skipped <= num_computed < num_tokens <= room or (skipped and row.extras):
            raise ValueError(
                f"slot {slot}: got {num_computed} computed of {num_tokens} tokens, {skipped} "
                f"skipped, expected fewer, and room in {len(block_ids)} blocks of {self.block_size}"
            )
        if not 0 <= row.num_prompt_tokens <= num_tokens:
            found = f"got {row.num_prompt_tokens}, expected 0 to {num_tokens}"
            raise ValueError(f"prompt tokens of slot {slot}: {found}")
        check_range(f"token id of slot {slot}", given, self.vocab_size)
        self._active[slot] = True
        self._num_prefill_tokens[slot] = num_tokens
        self._num_computed[slot] = num_computed
        self._prompt_ends[slot] = row.num_prompt_tokens
        self._is_paused[slot] = False
        self._num_row_blocks[slot] = 0
        self._states[slot] = -1
        self._prefill_tokens[slot] = np.zeros(num_tokens, np.int32)
        self._prefill_tokens[slot][skipped:] = given
        self._changes.parameters[slot] = np.concatenate([[np.int32(slot)], NEUTRAL_WORDS])
        self.set_numbers(slot, {"seed": row.seed, **row.sampling})
        return block_ids

    def _append(self, slots: Integers, block_ids: Integers) -> None:
        """Append blocks to the tables of their rows, in the given order."""
        self._check_active(slots)
        check_range("block id", block_ids, self.num_blocks)
        order = np.argsort(slots, kind="stable")
        slots, block_ids = slots[order], block_ids[order]
        # number of earlier new blocks of the same row, for each block
        num_before = np.arange(len(slots)) - np.searchsorted(slots, slots)
        columns = self._num_row_blocks[slots] + num_before
        check_range("block of a row", columns, self.max_blocks)
        np.add.at(self._num_row_blocks, slots, 1)
        entries = np.stack([slots, columns, block_ids], 1).astype(np.int32)
        self._changes.appended.append(entries.ravel())

    def _rows(self, slots: Integers, counts: Integers, ends: Integers, decoded: Integers) -> Rows:
        """Return the rows of a step, with its record.

        ends: lengths of the rows after the step. decoded: token ids of decode rows, or -1.
        """
        num_decode, explicit = len(decoded), decoded >= 0
        samples = ends >= self._num_prefill_tokens[slots]
        prefilled, offsets = self._take_prefill_tokens(slots[num_decode:], counts[num_decode:])
        explicit_ids = decoded[explicit].astype(np.int32)
        record, rows = make_record(len(slots), self._changes, [explicit_ids, *prefilled])
        rows[:, layout.SLOT], rows[:, layout.STATES] = slots, self._take_states(slots)
        rows[:, layout.PROMPT_END] = self._prompt_ends[slots]
        rows[:, layout.START] = ends - counts
        rows[:, layout.COUNT] = counts
        rows[:, layout.FIRST] = np.cumsum(counts) - counts
        rows[:num_decode, layout.TOKEN_INDEX] = np.where(explicit, -1 - np.cumsum(explicit), -1)
        rows[num_decode:, layout.TOKEN_INDEX] = np.count_nonzero(explicit) + offsets
        rows[:, layout.FIRST_KEY] = np.cumsum(ends) - ends
        rows[:, layout.SAMPLING_SLOT] = np.where(samples, slots, -1)
        sampled = np.flatnonzero(samples)
        shape = shape_of(counts, num_decode, int(ends.max()))
        order = np.argsort(slots[sampled], kind="stable")
        return Rows(record, rows, shape, sampled[order])

    def _take_prefill_tokens(
        self, slots: Integers, counts: Integers
    ) -> tuple[list[Record], Integers]:
        """Return the prefill tokens of chunks, and the offset of each chunk's first token."""
        taken = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            token_ids, begin = self._prefill_tokens[slot], int(self._num_computed[slot])
            taken.append(token_ids[begin : begin + count])
            if begin + count == len(token_ids):
                del self._prefill_tokens[slot]
        return taken, np.cumsum(counts) - counts

    def _check_chunks(self, slots: Integers, lengths: Integers) -> None:
        self._check_active(slots)
        num_left = self._num_prefill_tokens[slots] - self._num_computed[slots]
        wrong = (lengths < 1) | (lengths > num_left)
        if wrong.any():
            slot, length, left = slots[wrong][0], lengths[wrong][0], num_left[wrong][0]
            raise ValueError(f"chunk of slot {slot}: got {length} tokens, expected 1 to {left}")
        if len(set(slots.tolist())) != len(slots):
            raise ValueError(f"chunks: got slots {slots.tolist()}, expected different slots")

    def _check_active(self, slots: Integers) -> None:
        check_range("slot", slots, len(self._active))
        if not self._active[slots].all():
            raise ValueError(
                f"slot: got {slots[~self._active[slots]][0]}, expected a slot with a row"
            )

    def _check_room(self, slots: Integers, ends: Integers) -> None:
        room = self._num_row_blocks[slots] * self.block_size
        if (ends > room).any():
            row = int((ends > room).argmax())
            raise ValueError(
                f"blocks of slot {slots[row]}: got {room[row]} tokens, expected {ends[row]}"
            )
